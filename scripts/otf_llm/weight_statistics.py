"""Per-channel sums and maxima of |W| over all linears that read an input, streamed from the checkpoint."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from tqdm import tqdm

from otf_llm.blocks import in_order, row_blocks
from otf_llm.checkpoint import Checkpoint
from otf_llm.decoder import Geometry, decoder_linears, input_name
from otf_llm.families import HEAD_INPUT, Family
from otf_llm.streaming import load_tensors, save_tensors

ABS_SUM, MAXIMUM = "weight_abs_sum", "weight_max_abs"


def weight_statistics(
    checkpoint: Checkpoint, family: Family, geometry: Geometry, workers: int = 1
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Σ_i |W_ij| (float64 [K]) and max_i |W_ij| (float32 [K]) per linear input, keyed by global input name.

    The head's input is read by ``lm_head``, or by the embedding matrix where the two are tied. ``workers`` threads take
    a block each at a time; the sums do not depend on their number.
    """
    head = f"{family.head}.weight"
    readers: dict[str, list[str]] = {}
    for module, layer, linear in decoder_linears(family, geometry):
        readers.setdefault(input_name(family, layer, linear.reads), []).append(f"{module}.weight")
    readers[HEAD_INPUT] = [head if head in checkpoint.tensors else f"{family.embedding}.weight"]
    total = sum(checkpoint.tensors[tensor].size_bytes for tensors in readers.values() for tensor in tensors)
    tasks = (
        (name, tensor, start, stop)
        for name, tensors in readers.items()
        for tensor in tensors
        for start, stop in row_blocks(checkpoint.tensors[tensor].shape)
    )

    buffers = threading.local()  # given back and taken again at every block, they would break the heap into pieces

    def sums(task: tuple[str, str, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        _, tensor, start, stop = task
        info = checkpoint.tensors[tensor]
        count = info.num_elements // info.shape[0] * (stop - start)
        if getattr(buffers, "count", 0) < count:
            buffers.count = count
            buffers.read = torch.empty(count * info.size_bytes // info.num_elements, dtype=torch.uint8)
            buffers.wide = torch.empty(count, dtype=torch.float64)
        block = checkpoint.read_rows(tensor, start, stop, buffers.read)
        wide = buffers.wide[:count].view_as(block).copy_(block).abs_()
        return wide.sum(0), wide.amax(0).float()

    statistics = {}
    with tqdm(total=total, unit="B", unit_scale=True, desc="weight statistics") as bar:
        for (name, tensor, start, stop), (abs_sum, maximum) in in_order(sums, tasks, workers):
            if name not in statistics:
                statistics[name] = torch.zeros_like(abs_sum), torch.zeros_like(maximum)
            # Summed in place: the results of blocks, kept, would pin pieces of their threads' memory for good.
            statistics[name][0].add_(abs_sum)
            torch.maximum(statistics[name][1], maximum, out=statistics[name][1])
            info = checkpoint.tensors[tensor]
            bar.update(info.size_bytes * (stop - start) // info.shape[0])
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
