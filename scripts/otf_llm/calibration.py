"""Activation statistics of every linear input, over real tokens only.

For each input and channel: Σ|x|, Σx² and the number of tokens, summed in FP64; on request also the second moments
Σ x xᵀ that error feedback needs (GPTQ, Frantar et al. 2023: H ∝ E[x xᵀ]).
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import torch

from otf_llm.calibration_profile import ActivationStatistics
from otf_llm.families import HEAD_INPUT, Family, Geometry, input_name
from otf_llm.layerwise import Batch, LayerwiseModel
from otf_llm.streaming import SafetensorsWriter, TensorSpec


class _Sums:
    def __init__(self, width: int):
        self.abs_sum = torch.zeros(width, dtype=torch.float64)
        self.square_sum = torch.zeros(width, dtype=torch.float64)
        self.token_count = 0

    def add(self, activation: torch.Tensor) -> None:
        """Add the rows of a float [T, K] activation, squared in FP64: narrower types overflow before their sums do."""
        activation = activation.double()
        self.abs_sum += activation.abs().sum(0).cpu()
        self.square_sum += activation.square().sum(0).cpu()
        self.token_count += activation.shape[0]


def calibrate(
    model: LayerwiseModel,
    geometry: Geometry,
    sequences: list[torch.Tensor],
    batch_size: int,
    padding_side: str = "right",
) -> dict[str, ActivationStatistics]:
    """Collect the statistics of all decoder inputs and of the head's input.

    Args:
        sequences: token ids, int [T_i] each, of any lengths; they are padded per batch and the padding is masked
            in attention and left out of every sum, so the result does not depend on batch size or padding side.

    Returns:
        statistics keyed by global input name (``model.layers.0.attention_input`` … ``head_input``).

    Raises ValueError when there is no sequence or a layer's output is not finite.
    """
    if not sequences:
        raise ValueError("calibration needs at least one sequence of tokens")
    sums: dict[str, _Sums] = {}

    def watch(index: int, layer: torch.nn.Module, batch: Batch):
        def add(name, linear_input, activation):
            total = sums.setdefault(name, _Sums(geometry.in_features(linear_input.axis)))
            total.add(activation[batch.real])

        return _hooks(model.family, index, layer, add)

    batches = model.prepare(sequences, batch_size, padding_side)
    model.run(batches, watch)
    sums[HEAD_INPUT] = _Sums(geometry.hidden_size)
    for batch in batches:
        sums[HEAD_INPUT].add(batch.hidden[batch.real])
    return {name: ActivationStatistics(s.abs_sum, s.square_sum, s.token_count) for name, s in sums.items()}


def write_second_moments(
    model: LayerwiseModel, geometry: Geometry, sequences: list[torch.Tensor], batch_size: int, path: Path
) -> None:
    """Write E[x xᵀ], float32 [K, K], of every decoder input and the head's, one layer held at a time."""
    family = model.family
    widths = {
        input_name(family, layer, i): geometry.in_features(i.axis)
        for layer in range(geometry.num_layers)
        for i in family.inputs
    } | {HEAD_INPUT: geometry.hidden_size}
    sums: dict[str, torch.Tensor] = {}
    tokens = sum(len(sequence) for sequence in sequences)
    path.parent.mkdir(parents=True, exist_ok=True)
    specs = [TensorSpec(name, torch.float32, (width, width)) for name, width in widths.items()]
    with SafetensorsWriter(path, specs) as writer:

        def flush() -> None:
            for name in list(sums):
                writer.write(name, (sums.pop(name) / tokens).float().cpu())

        def watch(index: int, layer: torch.nn.Module, batch: Batch):
            if batch is batches[0]:
                flush()

            def add(name, linear_input, activation):
                x = activation[batch.real].double()
                sums[name] = sums.get(name, 0) + x.T @ x

            return _hooks(family, index, layer, add)

        batches = model.prepare(sequences, batch_size)
        model.run(batches, watch)
        flush()
        for batch in batches:
            x = batch.hidden[batch.real].double()
            sums[HEAD_INPUT] = sums.get(HEAD_INPUT, 0) + x.T @ x
        flush()


@contextmanager
def _hooks(family: Family, index: int, layer: torch.nn.Module, add):
    """Call ``add(input name, input, activation [B, T, K])`` for each linear input while the layer runs."""
    handles = []
    for linear_input in family.inputs:
        reader = layer.get_submodule(family.readers(linear_input)[0].path)
        name = input_name(family, index, linear_input)

        def hook(_module, arguments, name=name, linear_input=linear_input):
            add(name, linear_input, arguments[0])

        handles.append(reader.register_forward_pre_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
