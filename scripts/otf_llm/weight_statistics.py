"""Per-channel sums and maxima of |W| over all linears that read an input, streamed from the checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from tqdm import tqdm

from otf_llm.checkpoint import Checkpoint, row_blocks
from otf_llm.families import HEAD_INPUT, Family, Geometry, input_name
from otf_llm.streaming import load_tensors, save_tensors

ABS_SUM, MAXIMUM = "weight_abs_sum", "weight_max_abs"


def weight_statistics(
    checkpoint: Checkpoint, family: Family, geometry: Geometry
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Σ_i |W_ij| (float64 [K]) and max_i |W_ij| (float32 [K]) per linear input, keyed by global input name.

    The head's input is read by ``lm_head``, or by the embedding matrix where the two are tied.
    """
    head = f"{family.head}.weight"
    readers = {
        input_name(family, layer, i): [f"{family.layers}.{layer}.{r.path}.weight" for r in family.readers(i)]
        for layer in range(geometry.num_layers)
        for i in family.inputs
    } | {HEAD_INPUT: [head if head in checkpoint.tensors else f"{family.embedding}.weight"]}
    total = sum(checkpoint.tensors[tensor].size_bytes for tensors in readers.values() for tensor in tensors)
    statistics = {}
    with tqdm(total=total, unit="B", unit_scale=True, desc="weight statistics") as bar:
        for name, tensors in readers.items():
            width = checkpoint.tensors[tensors[0]].shape[1]
            abs_sum, maximum = torch.zeros(width, dtype=torch.float64), torch.zeros(width)
            for tensor in tensors:
                info = checkpoint.tensors[tensor]
                for start, stop in row_blocks(info.shape):
                    block = checkpoint.read_rows(tensor, start, stop).float().abs_()
                    abs_sum += block.sum(0, dtype=torch.float64)
                    maximum = torch.maximum(maximum, block.amax(0))
                bar.update(info.size_bytes)
            statistics[name] = abs_sum, maximum
    return statistics


def save_weight_statistics(path: Path, statistics: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write the two vectors of every input."""
    tensors = {}
    for name, (abs_sum, maximum) in statistics.items():
        tensors[f"{name}.{ABS_SUM}"], tensors[f"{name}.{MAXIMUM}"] = abs_sum, maximum
    save_tensors(path, tensors, {"inputs": list(statistics)})


def load_weight_statistics(path: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Read what ``save_weight_statistics`` wrote."""
    tensors, metadata = load_tensors(path)
    if "inputs" not in metadata:
        raise ValueError(f"{path} holds no weight statistics")
    return {name: (tensors[f"{name}.{ABS_SUM}"], tensors[f"{name}.{MAXIMUM}"]) for name in metadata["inputs"]}
