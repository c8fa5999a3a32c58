"""Streamed conversion of one source shard: row blocks in, codes, scales and FP16 columns out.

Each source tensor becomes one or more output tensors whose sizes follow from its shape, so the output file is laid out
before the first weight is read and memory holds one row block. A tensor that is not quantised keeps its bytes; where an
axis is folded its rows or columns are reordered, nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from otf_llm.calibration_profile import ActivationStatistics, load_statistics
from otf_llm.checkpoint import Checkpoint, TensorInfo, row_blocks
from otf_llm.families import (
    HEAD_INPUT,
    Axis,
    Family,
    Geometry,
    Kind,
    Role,
    find_family,
    input_name,
    tensor_role,
    unknown_tensors,
)
from otf_llm.files import sha256
from otf_llm.packing import pack_int4
from otf_llm.permutation import Permutation
from otf_llm.quantization import SCALE_DTYPE, num_groups, quantize_int4, quantize_int8_rows
from otf_llm.settings import SchemeSettings
from otf_llm.streaming import DTYPES, SafetensorsWriter, TensorSpec

FP16_LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a conversion besides the weights.

    ``permutation`` and ``statistics`` may be None only for schemes that quantise no linear. ``digest`` tells recipes
    apart: shards of different ones are never put together.
    """

    family: Family
    geometry: Geometry
    scheme: SchemeSettings
    permutation: Permutation | None
    statistics: dict[str, ActivationStatistics] | None
    digest: str = ""

    @classmethod
    def load(cls, checkpoint: Checkpoint, scheme: SchemeSettings, calibrated: list[Path]) -> Recipe:
        """The recipe for a checkpoint; ``calibrated`` holds the permutation's and the profile's paths, or nothing.

        Raises ValueError where the scheme does not suit the model: a head to be tied that is not, or a residual fold
        with tensors outside the family's table.
        """
        family = find_family(checkpoint.config)
        geometry = Geometry.of(checkpoint.config, family)
        permutation = statistics = None
        if scheme.needs_calibration:
            permutation, statistics = Permutation.load(calibrated[0]), load_statistics(calibrated[1])
        inputs = [json.dumps(scheme.to_dict(), sort_keys=True), *(sha256(path) for path in calibrated)]
        digest = hashlib.sha256("\n".join(inputs).encode()).hexdigest()
        recipe = cls(family, geometry, scheme, permutation, statistics, digest)
        scheme.head_for(geometry.tied)
        check_foldable(recipe, unknown_tensors(family, checkpoint.tensors))
        return recipe

    @property
    def head(self) -> str:
        """``tied``, ``int4`` or ``keep``."""
        return self.scheme.head_for(self.geometry.tied)

    def input_of(self, role: Role) -> str:
        """Global name of the input that a linear or the head reads."""
        return HEAD_INPUT if role.linear is None else input_name(self.family, role.layer, role.linear.reads)


@dataclass(frozen=True)
class _Job:
    """One way in which a source tensor is written: its output specs and the function that streams it."""

    specs: list[TensorSpec]
    run: Callable[[SafetensorsWriter], dict]


def convert_shard(checkpoint: Checkpoint, shard: str, recipe: Recipe, destination: Path) -> dict:
    """Convert the tensors of one source shard into the safetensors file ``destination``.

    Returns:
        ``sha256`` of the written file, the recipe's digest, and under ``tensors`` one row per output group: ``tensor``
        (source), ``module``, ``action`` (int4, int8, copied, reordered, dropped), ``outputs`` (name → bytes), and for
        quantised ones ``relative_error``: Σ h(w-ŵ)² / Σ h w², h = E[x²] for linears and 1 for the embedding.

    Raises ValueError naming the tensor for values that the format cannot hold, OSError naming the path when a write
    fails.
    """
    jobs: list[tuple[TensorInfo, _Job]] = []
    for info in checkpoint.shard_tensors(shard):
        jobs += [(info, job) for job in _plan(checkpoint, info, recipe)]
    destination.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    specs = [spec for _, job in jobs for spec in job.specs]
    total = sum(info.size_bytes for info, _ in jobs)
    with (
        SafetensorsWriter(destination, specs) as writer,
        tqdm(total=total, unit="B", unit_scale=True, desc=shard) as bar,
    ):
        for info, job in jobs:
            try:
                row = job.run(writer)
            except ValueError as error:
                raise ValueError(f"{info.name}: {error}") from error
            outputs = {spec.name: spec.size_bytes for spec in job.specs}
            rows.append({"tensor": info.name, "source_bytes": info.size_bytes, **row, "outputs": outputs})
            bar.update(info.size_bytes)
    return {"sha256": sha256(destination), "recipe": recipe.digest, "tensors": rows}


def _plan(checkpoint: Checkpoint, info: TensorInfo, recipe: Recipe) -> list[_Job]:
    role = tensor_role(recipe.family, info.name)
    scheme = recipe.scheme
    if role.kind is Kind.LINEAR and scheme.weights == "int4":
        return [_int4(checkpoint, info, recipe, role, info.name.removesuffix(".weight"))]
    if role.kind is Kind.LINEAR:
        return [_copied(checkpoint, info, recipe, role, info.name)]
    if role.kind is Kind.EMBEDDING:
        embedding = _int8_embedding if scheme.embedding == "int8" else _copied
        jobs = [embedding(checkpoint, info, recipe, role, info.name)]
        if recipe.geometry.tied:
            jobs += _head_of_tied_model(checkpoint, info, recipe)
        return jobs
    if role.kind is Kind.HEAD:
        if recipe.geometry.tied:
            return [_Job([], lambda writer: {"action": "dropped", "reason": "equal to the tied embedding"})]
        if recipe.head == "int4":
            return [_int4(checkpoint, info, recipe, role, recipe.family.head)]
        return [_copied(checkpoint, info, recipe, role, info.name)]
    return [_copied(checkpoint, info, recipe, role, info.name)]


def _head_of_tied_model(checkpoint: Checkpoint, info: TensorInfo, recipe: Recipe) -> list[_Job]:
    """A tied model's head is made from the embedding matrix, unless it goes on reading the embedding's own table."""
    role = Role(Kind.HEAD)
    if recipe.head == "int4":
        return [_int4(checkpoint, info, recipe, role, recipe.family.head)]
    if recipe.head == "keep" and recipe.scheme.embedding != "keep":
        return [_copied(checkpoint, info, recipe, role, f"{recipe.family.head}.weight")]
    return []


def _int4(checkpoint: Checkpoint, info: TensorInfo, recipe: Recipe, role: Role, module: str) -> _Job:
    name = recipe.input_of(role)
    order = recipe.permutation.inputs[name]
    columns = recipe.permutation.columns(name)
    rows = recipe.permutation.rows(role)
    outliers = order.num_outliers
    out_features, background = info.shape[0], info.shape[1] - outliers
    # BF16 keeps what FP16 cannot hold; the largest weight of these columns is known from the permute stage.
    outlier_dtype = torch.float16 if order.largest_outlier <= FP16_LARGEST else torch.bfloat16
    group_size = recipe.scheme.group_size
    groups = num_groups(background, group_size)
    specs = [
        TensorSpec(f"{module}.codes", torch.uint8, (out_features, (background + 1) // 2)),
        TensorSpec(f"{module}.scales", SCALE_DTYPE, (out_features, groups)),
        TensorSpec(f"{module}.outliers", outlier_dtype, (out_features, outliers)),
    ]
    mean_square = recipe.statistics[name].mean_square().float()
    importance = mean_square if mean_square.any() else torch.ones_like(mean_square)
    if columns is not None:
        importance = importance[columns]

    def run(writer: SafetensorsWriter) -> dict:
        error = energy = 0.0
        places = None if rows is None else torch.argsort(rows)
        for start, stop in row_blocks(info.shape):
            block = checkpoint.read_rows(info.name, start, stop).float()
            block = block if columns is None else block[:, columns]
            rest = block[:, outliers:]
            search = importance[outliers:] if recipe.scheme.scale_search else None
            codes, scales = quantize_int4(rest, group_size, search)
            where = None if places is None else places[start:stop]
            writer.write_rows(f"{module}.codes", pack_int4(codes), start, where)
            writer.write_rows(f"{module}.scales", scales, start, where)
            writer.write_rows(f"{module}.outliers", block[:, :outliers].to(outlier_dtype), start, where)
            error += _weighted_square(rest - _dequantized(codes, scales, group_size), importance[outliers:])
            energy += _weighted_square(block, importance)
        return {
            "action": "int4",
            "module": module,
            "shape": list(info.shape),
            "input": name,
            "num_outliers": outliers,
            "outlier_dtype": str(outlier_dtype).removeprefix("torch."),
            "relative_error": error / energy if energy else 0.0,
        }

    return _Job(specs, run)


def _dequantized(codes: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    width = group_size or codes.shape[1]
    return codes * scales.float().repeat_interleave(width, dim=1)[:, : codes.shape[1]]


def _weighted_square(matrix: torch.Tensor, importance: torch.Tensor) -> float:
    return (matrix.square().sum(0, dtype=torch.float64) * importance.double()).sum().item()


def _int8_embedding(checkpoint: Checkpoint, info: TensorInfo, recipe: Recipe, role: Role, name: str) -> _Job:
    module = name.removesuffix(".weight")
    columns = None if recipe.permutation is None else recipe.permutation.residual()
    specs = [
        TensorSpec(f"{module}.codes", torch.int8, info.shape),
        TensorSpec(f"{module}.scales", SCALE_DTYPE, info.shape[:1]),
    ]

    def run(writer: SafetensorsWriter) -> dict:
        error = energy = 0.0
        for start, stop in row_blocks(info.shape):
            block = checkpoint.read_rows(info.name, start, stop).float()
            block = block if columns is None else block[:, columns]
            codes, scales = quantize_int8_rows(block)
            writer.write_rows(f"{module}.codes", codes, start)
            writer.write_rows(f"{module}.scales", scales, start)
            error += (block - codes * scales.float()[:, None]).square().sum(dtype=torch.float64).item()
            energy += block.square().sum(dtype=torch.float64).item()
        relative = error / energy if energy else 0.0
        return {"action": "int8", "module": module, "shape": list(info.shape), "relative_error": relative}

    return _Job(specs, run)


def _copied(checkpoint: Checkpoint, info: TensorInfo, recipe: Recipe, role: Role, name: str) -> _Job:
    rows, columns = _fold_orders(recipe.permutation, recipe, role)
    spec = TensorSpec(name, DTYPES[info.dtype], info.shape)

    def run(writer: SafetensorsWriter) -> dict:
        if len(info.shape) == 2:
            places = None if rows is None else torch.argsort(rows)
            for start, stop in row_blocks(info.shape):
                block = checkpoint.read_rows(info.name, start, stop)
                block = block if columns is None else block[:, columns]
                writer.write_rows(name, block, start, None if places is None else places[start:stop])
        else:
            tensor = checkpoint.read(info.name)
            writer.write(name, tensor if rows is None else tensor[rows])
        moved = rows is not None or columns is not None
        row = {"action": "reordered" if moved else "copied", "shape": list(info.shape)}
        return row | ({"reason": "not in the family's table"} if role.kind is Kind.UNKNOWN else {})

    return _Job([spec], run)


def _fold_orders(
    permutation: Permutation | None, recipe: Recipe, role: Role
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Row and column order of a tensor that stays dense: folded axes only, for a dense linear gathers nothing."""
    if permutation is None:
        return None, None
    columns = None
    if role.kind in (Kind.EMBEDDING, Kind.HEAD):
        columns = permutation.residual()
    elif role.kind is Kind.LINEAR:
        folded = permutation.inputs[recipe.input_of(role)].folded
        columns = None if folded is None else permutation.orders[folded]
    return permutation.rows(role), columns


def fold_tensor(permutation: Permutation, recipe: Recipe, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A source tensor with the folded axes reordered and nothing quantised (used to prove that folding is exact)."""
    rows, columns = _fold_orders(permutation, recipe, tensor_role(recipe.family, name))
    tensor = tensor if rows is None else tensor[rows]
    return tensor if columns is None else tensor[:, columns]


def check_foldable(recipe: Recipe, unknown: list[str]) -> None:
    """Refuse to fold the residual stream of a checkpoint that holds tensors outside the family's table.

    Raises ValueError naming them: they would stay in the source's channel order.
    """
    folds = recipe.permutation.settings.fold if recipe.permutation else ()
    if unknown and Axis.RESIDUAL in folds:
        raise ValueError(
            f"permutation.fold: residual is not possible, the checkpoint holds tensors outside the "
            f"{recipe.family.name} table that would keep the old channel order: {', '.join(unknown[:5])}"
        )
