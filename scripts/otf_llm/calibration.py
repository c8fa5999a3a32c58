"""Activation statistics of every linear input, over real tokens only.

For each input and channel: Σ|x|, Σx² and the number of tokens, summed in FP64; on request also the second moments
Σ x xᵀ that error feedback needs (GPTQ, Frantar et al. 2023: H ∝ E[x xᵀ]).
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import torch

from otf_llm.calibration_profile import ActivationStatistics
from otf_llm.decoder import Geometry, decoder_inputs, input_name
from otf_llm.experts import Experts
from otf_llm.families import HEAD_INPUT, Family, LinearInput
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
    sums = {name: _Sums(width) for name, width in _widths(model.family, geometry).items()}

    def watch(index: int, layer: torch.nn.Module, batch: Batch):
        def add(name: str, activation: torch.Tensor) -> None:
            sums[name].add(activation)

        return _hooks(model.family, geometry, index, layer, batch.real, add)

    batches = model.prepare(sequences, batch_size, padding_side)
    model.run(batches, watch)
    for batch in batches:
        sums[HEAD_INPUT].add(batch.hidden[batch.real])
    return {name: ActivationStatistics(s.abs_sum, s.square_sum, s.token_count) for name, s in sums.items()}


def write_second_moments(
    model: LayerwiseModel, geometry: Geometry, sequences: list[torch.Tensor], batch_size: int, path: Path
) -> None:
    """Write E[x xᵀ], float32 [K, K], of every decoder input and the head's, one layer held at a time."""
    widths = _widths(model.family, geometry)
    sums: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    specs = [TensorSpec(name, torch.float32, (width, width)) for name, width in widths.items()]
    with SafetensorsWriter(path, specs) as writer:

        def flush() -> None:
            for name in list(sums):
                writer.write(name, (sums.pop(name) / max(counts.pop(name), 1)).float().cpu())
                widths.pop(name)

        def add(name: str, activation: torch.Tensor) -> None:
            x = activation.double()
            sums[name] = sums.get(name, 0) + x.T @ x
            counts[name] = counts.get(name, 0) + len(x)

        def watch(index: int, layer: torch.nn.Module, batch: Batch):
            if batch is batches[0]:
                flush()
            return _hooks(model.family, geometry, index, layer, batch.real, add)

        batches = model.prepare(sequences, batch_size)
        model.run(batches, watch)
        for batch in batches:
            add(HEAD_INPUT, batch.hidden[batch.real])
        flush()
        for name, width in widths.items():  # experts that no token was routed to
            writer.write(name, torch.zeros(width, width))


def _widths(family: Family, geometry: Geometry) -> dict[str, int]:
    """Channels of every linear input of the model, by its global name."""
    widths = {name: geometry.sizes[i.width] for name, _, i in decoder_inputs(family, geometry)}
    return widths | {HEAD_INPUT: geometry.hidden_size}


@contextmanager
def _hooks(family: Family, geometry: Geometry, index: int, layer: torch.nn.Module, real: torch.Tensor, add):
    """Call ``add(input name, activation [n, K])`` with the real tokens of each linear input while the layer runs.

    Experts get no padding: what they see is of real tokens only.
    """

    def watcher(linear_input: LinearInput):
        name = input_name(family, index, linear_input)
        if linear_input.expert is None:
            return lambda _module, arguments: add(name, arguments[0][real])
        return lambda _module, arguments: add(name, arguments[0])

    def route_no_padding(experts: Experts, arguments):
        x, top_k_index, top_k_weights = arguments
        return x, top_k_index.masked_fill(~real.reshape(-1, 1), len(experts)), top_k_weights

    handles = [
        layer.get_submodule(linear_input.seen_by).register_forward_pre_hook(watcher(linear_input))
        for linear_input in geometry.layers[index].inputs
    ]
    for module in layer.modules():
        if isinstance(module, Experts):
            handles.append(module.register_forward_pre_hook(route_no_padding))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
