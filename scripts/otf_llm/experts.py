"""Experts as modules: a linear of its own for every projection of every expert.

transformers holds a layer's experts in two 3-D parameters. Taken apart, an expert's projections can be watched, loaded
one by one and replaced by packed linears like any other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Expert(nn.Module):
    """One gated MLP: down(act(gate(x)) * up(x)), without biases."""

    def __init__(self, hidden_size: int, intermediate_size: int, act_fn: Callable, dtype: torch.dtype):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False, dtype=dtype)
        self.act_fn = act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: float [T, H] → [T, H]."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.ModuleList):
    """The experts of a layer; stands in for transformers' module of fused ones and computes the same."""

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Σ over its experts of weight * expert(token), float [T, H].

        Args:
            x: float [T, H]. top_k_index: int [T, k], the experts of every token; the number of experts stands for none.
            top_k_weights: float [T, k].
        """
        result = torch.zeros_like(x)
        for expert in top_k_index.unique().tolist():
            if expert == len(self):
                continue
            tokens, positions = torch.where(top_k_index == expert)
            weighted = self[expert](x[tokens]) * top_k_weights[tokens, positions, None]
            result.index_add_(0, tokens, weighted.to(result.dtype))
        return result


def split_experts(model: nn.Module, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Replace modules of fused experts in ``model`` by ones of separate experts, on the device of their weights.

    ``wanted`` is asked for every such module by name. The new weights are not set: split before a model is loaded.
    """
    for name, module in list(model.named_modules()):
        fused = getattr(module, "gate_up_proj", None)
        if not isinstance(fused, nn.Parameter) or fused.ndim != 3 or not wanted(name):
            continue
        num_experts, rows, hidden_size = fused.shape
        with torch.device(fused.device):
            experts = [Expert(hidden_size, rows // 2, module.act_fn, fused.dtype) for _ in range(num_experts)]
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, Experts(experts))
