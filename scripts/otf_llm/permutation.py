"""Global static permutation: which input channels stay FP16, and in which order the rest are grouped.

Importance of input channel j is |W| × |X|: the sum of |W_ij| over the rows of all linears that read the input, times
the mean |x_j| over the calibration tokens. The most important channels of each order come first and stay FP16; the
rest follow in the order that groups them for quantisation.

Orders live in one table, ``global_perm_idx``. Where an axis is folded, its order is applied to the weights offline
(rows of the producers, columns of the consumers, norms, embedding, biases) and nothing is gathered at run time;
elsewhere an order is a *runtime* index list, x_ordered = x[..., order].
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import torch

from otf_llm.calibration_profile import ActivationStatistics
from otf_llm.decoder import Geometry, Role, decoder_inputs
from otf_llm.families import HEAD_INPUT, Axis, Family, Kind, LinearInput
from otf_llm.packing import is_permutation
from otf_llm.settings import PermutationSettings
from otf_llm.streaming import load_tensors, save_tensors

logger = logging.getLogger(__name__)

TABLE = "global_perm_idx"


@dataclass(frozen=True)
class ChannelStatistics:
    """What the permutation needs of one linear input, each a vector over its K channels.

    abs_activation: float64 [K], mean |x_j| over calibration tokens; abs_weight: float64 [K], Σ_i |W_ij| over all rows
    that read the input; max_weight: float32 [K], max_i |W_ij|.
    """

    abs_activation: torch.Tensor
    abs_weight: torch.Tensor
    max_weight: torch.Tensor

    def importance(self) -> torch.Tensor:
        """|W| × |X|, float64 [K], scaled to mean 1; by weight alone where no activation was ever seen."""
        product = self.abs_weight * self.abs_activation
        if not product.any():
            product = self.abs_weight
        return product / product.mean() if product.any() else torch.ones_like(product)


def channel_statistics(
    activations: dict[str, ActivationStatistics], weights: dict[str, tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, ChannelStatistics]:
    """Bring the profile and the weights' sums together; raises ValueError naming an input that the profile lacks."""
    missing = [name for name in weights if name not in activations]
    if missing:
        raise ValueError(f"the calibration profile has no statistics for {', '.join(missing[:3])}")
    return {
        name: ChannelStatistics(activations[name].mean_abs(), abs_sum, maximum)
        for name, (abs_sum, maximum) in weights.items()
    }


@dataclass(frozen=True)
class InputOrder:
    """How one linear input is ordered.

    ``largest_outlier`` is the largest |W_ij| in the FP16 columns of all readers. ``folded`` and ``runtime`` name orders
    of the permutation (or None): the weights' columns are taken in the folded order first, then in the runtime one, and
    the activation is gathered by the runtime order only.
    """

    in_features: int
    num_outliers: int
    largest_outlier: float
    folded: str | None
    runtime: str | None


@dataclass(frozen=True)
class Permutation:
    """All orders of a model, by name (integers [K], int64 or as stored), and how every linear input uses them."""

    settings: PermutationSettings
    orders: dict[str, torch.Tensor]
    inputs: dict[str, InputOrder]
    unseen: tuple[str, ...] = ()

    def columns(self, name: str) -> torch.Tensor | None:
        """Source columns in stored order for the linears that read input ``name``; None for the source's own order."""
        return _source_columns(self.inputs[name], self.orders)

    def folded_columns(self, name: str) -> torch.Tensor | None:
        """As `columns`, for a linear that stays dense and gathers nothing: the folded order alone."""
        folded = self.inputs[name].folded
        return None if folded is None else self.orders[folded].long()

    def rows(self, role: Role) -> torch.Tensor | None:
        """Source rows in stored order for a weight, bias or norm with the given role; None where nothing moves."""
        if role.kind is Kind.NORM:
            return self.residual()
        if role.kind in (Kind.LINEAR, Kind.BIAS):
            axis = role.linear.rows
            name = axis if axis is Axis.RESIDUAL else _axis_order(axis, role.layer, role.linear.expert)
            order = self.orders.get(name)
            return None if order is None else order.long()
        return None

    def residual(self) -> torch.Tensor | None:
        """The folded order of the residual stream (columns of embedding), or None."""
        order = self.orders.get(Axis.RESIDUAL)
        return None if order is None else order.long()

    def runtime_table(self, inputs: Iterable[str]) -> tuple[torch.Tensor, dict[str, int]]:
        """What ``inputs`` are gathered with: one table, int16 (int32 where a width needs it), and its offsets."""
        names = sorted({self.inputs[name].runtime for name in inputs} - {None})
        return _table([self.orders[name] for name in names]), _offsets(names, self.orders)

    def save(self, path: Path) -> None:
        """Write the one table with its orders and inputs; the bytes depend on the permutation alone."""
        names = sorted(self.orders)
        description = {
            "settings": self.settings.to_dict(),
            "orders": {n: [o, len(self.orders[n])] for n, o in _offsets(names, self.orders).items()},
            "inputs": {name: vars(order) for name, order in self.inputs.items()},
            "unseen": list(self.unseen),
        }
        save_tensors(path, {TABLE: _table([self.orders[name] for name in names])}, description)

    @classmethod
    def load(cls, path: Path) -> Permutation:
        """Read a permutation; raises ValueError naming the file if it is none."""
        tensors, description = load_tensors(path)
        if TABLE not in tensors or "inputs" not in description:
            raise ValueError(f"{path} is not a permutation table")
        table = tensors[TABLE]
        orders = {name: table[start : start + size] for name, (start, size) in description["orders"].items()}
        for name, (_, size) in description["orders"].items():
            if not is_permutation(orders[name], size):
                raise ValueError(f"{path}: the order {name} is no permutation of {size} channels; make the file again")
        return cls(
            settings=PermutationSettings.from_dict(description["settings"]),
            orders=orders,
            inputs={name: InputOrder(**order) for name, order in description["inputs"].items()},
            unseen=tuple(description["unseen"]),
        )


def _source_columns(order: InputOrder, orders: dict[str, torch.Tensor]) -> torch.Tensor | None:
    folded = None if order.folded is None else orders[order.folded].long()
    runtime = None if order.runtime is None else orders[order.runtime].long()
    if folded is None or runtime is None:
        return folded if runtime is None else runtime
    return folded[runtime]


def _offsets(names: Iterable[str], orders: dict[str, torch.Tensor]) -> dict[str, int]:
    offsets, position = {}, 0
    for name in names:
        offsets[name] = position
        position += len(orders[name])
    return offsets


def _table(orders: list[torch.Tensor]) -> torch.Tensor:
    table = torch.cat(orders) if orders else torch.zeros(0, dtype=torch.int64)
    fits = table.numel() == 0 or table.max() <= torch.iinfo(torch.int16).max
    return table.to(torch.int16 if fits else torch.int32)


def _axis_order(axis: Axis, layer: int, expert: int | None) -> str:
    return f"{axis}.{layer}" if expert is None else f"{axis}.{layer}.{expert}"


def outlier_count(in_features: int, settings: PermutationSettings) -> int:
    """Number of FP16 columns: the fraction of K rounded up, from ``minimum_outliers`` to K; 0 at fraction 0."""
    fraction = Fraction(str(settings.outlier_fraction))
    if fraction == 0:
        return 0
    exact = fraction * in_features
    rounded_up = -(-exact.numerator // exact.denominator)
    return min(in_features, max(rounded_up, settings.minimum_outliers))


def channel_order(importance: torch.Tensor, max_weight: torch.Tensor, num_outliers: int, order: str) -> torch.Tensor:
    """Order of one input's channels, int64 [K]: outliers by falling importance, then the background.

    ``order`` sorts the background: ``max_abs_weight`` (falling max |W_ij|, so that a group holds columns of like
    range), ``importance`` (falling) or ``natural`` (as in the source). Ties keep the lower index first.
    """
    ranked = importance.argsort(descending=True, stable=True)
    background = ranked[num_outliers:]
    if order != "importance":
        background = background.sort().values
    if order == "max_abs_weight":
        background = background[max_weight[background].argsort(descending=True, stable=True)]
    return torch.cat([ranked[:num_outliers], background])


def plan_permutation(
    family: Family,
    geometry: Geometry,
    statistics: dict[str, ChannelStatistics],
    settings: PermutationSettings,
) -> Permutation:
    """Decide every order of the model.

    Args:
        statistics: per linear input, keyed by its global name (``model.layers.0.mlp_input``, ``head_input``).

    Raises ValueError naming an input whose statistics are missing or not finite.
    """
    _check_statistics(family, geometry, statistics)
    planner = _Planner(family, geometry, statistics, settings)
    planner.fold_axes()
    for name, layer, linear_input in planner.named_inputs():
        planner.order_input(name, layer, linear_input)
    unseen = tuple(sorted(name for name, stats in statistics.items() if not stats.abs_activation.any()))
    if unseen:
        logger.warning(
            "%d linear inputs saw no calibration token or only zeros; their channels are ranked by weight alone: %s",
            len(unseen),
            ", ".join(unseen),
        )
    return Permutation(settings, planner.orders, planner.inputs, unseen)


def _check_statistics(family, geometry, statistics) -> None:
    for name in [*(name for name, *_ in decoder_inputs(family, geometry)), HEAD_INPUT]:
        if name not in statistics:
            raise ValueError(f"the calibration profile has no statistics for {name}")
        for vector in vars(statistics[name]).values():
            if not torch.isfinite(vector).all():
                raise ValueError(f"the calibration profile of {name} holds NaN or Inf")


class _Planner:
    def __init__(self, family, geometry, statistics, settings):
        self.family, self.geometry, self.statistics, self.settings = family, geometry, statistics, settings
        self.orders: dict[str, torch.Tensor] = {}
        self.inputs: dict[str, InputOrder] = {}

    def named_inputs(self):
        """(global name, layer, input) of every linear input, the head's last."""
        yield from decoder_inputs(self.family, self.geometry)
        yield HEAD_INPUT, None, LinearInput(HEAD_INPUT, Axis.RESIDUAL, "hidden", self.family.head)

    def fold_axes(self) -> None:
        folds = self.settings.fold
        if Axis.RESIDUAL in folds:
            readers = [self.statistics[name] for name, _, i in self.named_inputs() if i.axis is Axis.RESIDUAL]
            self.orders[Axis.RESIDUAL] = self._order(*_aggregate(readers))
        for name, layer, linear_input in self.named_inputs():
            axis, stats = linear_input.axis, self.statistics[name]
            if axis is Axis.INTERMEDIATE and axis in folds:
                order = self._order(stats.importance(), stats.max_weight)
                self.orders[_axis_order(axis, layer, linear_input.expert)] = order
            if axis is Axis.VALUE and axis in folds:
                self.orders[_axis_order(axis, layer, linear_input.expert)] = self._value_order(stats)

    def order_input(self, name: str, layer: int | None, linear_input: LinearInput) -> None:
        stats, axis = self.statistics[name], linear_input.axis
        size = len(stats.max_weight)
        count = outlier_count(size, self.settings)
        folded, runtime = axis if axis is Axis.RESIDUAL else _axis_order(axis, layer, linear_input.expert), None
        if axis is Axis.VALUE and folded in self.orders:
            # Heads cannot mix, so the outliers of o_proj's input stay an index list over the folded order.
            source = self._expand_heads(self.orders[folded])
            folded, runtime = f"{folded}.columns", name
            self.orders[folded] = source
            self.orders[runtime] = channel_order(stats.importance()[source], stats.max_weight[source], count, "natural")
        elif folded not in self.orders:
            folded, runtime = None, self._runtime_order(name, stats)
        self.inputs[name] = InputOrder(size, count, 0.0, folded, runtime)
        columns = _source_columns(self.inputs[name], self.orders)[:count]
        largest = stats.max_weight[columns].max().item() if count else 0.0
        self.inputs[name] = replace(self.inputs[name], largest_outlier=largest)

    def _runtime_order(self, name: str, stats: ChannelStatistics) -> str:
        if self.settings.scope == "input":
            self.orders[name] = self._order(stats.importance(), stats.max_weight)
            return name
        shared = f"width.{len(stats.max_weight)}"
        if shared not in self.orders:
            same = [s for s in self.statistics.values() if len(s.max_weight) == len(stats.max_weight)]
            self.orders[shared] = self._order(*_aggregate(same))
        return shared

    def _order(self, importance: torch.Tensor, max_weight: torch.Tensor) -> torch.Tensor:
        return channel_order(importance, max_weight, outlier_count(len(importance), self.settings), self.settings.order)

    def _value_order(self, stats: ChannelStatistics) -> torch.Tensor:
        """Rows of v_proj, int64 [num_kv_heads * head_dim]: ordered inside each key/value head."""
        heads = (self.geometry.num_kv_heads, -1, self.geometry.head_dim)
        importance = stats.importance().view(heads).sum(1)
        largest = stats.max_weight.view(heads).amax(1)
        inside = [channel_order(i, m, 0, self.settings.order) for i, m in zip(importance, largest, strict=True)]
        return torch.cat([order + head * self.geometry.head_dim for head, order in enumerate(inside)])

    def _expand_heads(self, rows: torch.Tensor) -> torch.Tensor:
        """Columns of o_proj, int64 [num_heads * head_dim]: every query head follows its key/value head's order."""
        head_dim, kv_heads = self.geometry.head_dim, self.geometry.num_kv_heads
        inside = rows.view(kv_heads, head_dim) - torch.arange(kv_heads)[:, None] * head_dim
        per_head = inside.repeat_interleave(self.geometry.num_heads // kv_heads, dim=0)
        return (per_head + torch.arange(self.geometry.num_heads)[:, None] * head_dim).reshape(-1)


def _aggregate(readers: list[ChannelStatistics]) -> tuple[torch.Tensor, torch.Tensor]:
    """One importance and one range for channels that several inputs share; every input counts alike."""
    importance = torch.stack([reader.importance() for reader in readers]).sum(0)
    return importance, torch.stack([reader.max_weight for reader in readers]).amax(0)
