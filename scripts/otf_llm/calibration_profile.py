"""The calibration profile: what was measured of every linear input, on disk and in memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from otf_llm.streaming import load_tensors, save_tensors

ABS_SUM, SQUARE_SUM, COUNT = "abs_sum", "square_sum", "token_count"


@dataclass(frozen=True)
class ActivationStatistics:
    """Statistics of one linear input: float64 [K] sums of |x| and of x², and the number of tokens summed."""

    abs_sum: torch.Tensor
    square_sum: torch.Tensor
    token_count: int

    def mean_abs(self) -> torch.Tensor:
        """Mean |x_j| per channel, float64 [K]; zero where no token was seen."""
        return self.abs_sum / max(self.token_count, 1)

    def mean_square(self) -> torch.Tensor:
        """Mean x_j² per channel, float64 [K]; zero where no token was seen."""
        return self.square_sum / max(self.token_count, 1)


def save_statistics(path: Path, statistics: dict[str, ActivationStatistics], metadata: dict) -> None:
    """Write a profile: one tensor per input and sum, token counts and ``metadata`` in the header."""
    tensors = {}
    for name, stats in statistics.items():
        tensors[f"{name}.{ABS_SUM}"] = stats.abs_sum
        tensors[f"{name}.{SQUARE_SUM}"] = stats.square_sum
    counts = {name: stats.token_count for name, stats in statistics.items()}
    save_tensors(path, tensors, {**metadata, COUNT: counts})


def load_statistics(path: Path, inputs: Collection[str] | None = None) -> dict[str, ActivationStatistics]:
    """Read a profile, or only some of its ``inputs``.

    Raises ValueError naming the file, or the input whose statistics are NaN, Inf or negative.
    """

    def wanted(tensor: str) -> bool:
        return inputs is None or tensor.rpartition(".")[0] in inputs

    tensors, metadata = load_tensors(path, wanted)
    if COUNT not in metadata:
        raise ValueError(f"{path} is not a calibration profile")
    statistics = {}
    for name, count in metadata[COUNT].items():
        if inputs is not None and name not in inputs:
            continue
        stats = ActivationStatistics(tensors[f"{name}.{ABS_SUM}"], tensors[f"{name}.{SQUARE_SUM}"], count)
        for vector in (stats.abs_sum, stats.square_sum):
            if not torch.isfinite(vector).all() or (vector < 0).any():
                raise ValueError(f"{path}: the statistics of {name} hold NaN, Inf or negative values")
        statistics[name] = stats
    return statistics
