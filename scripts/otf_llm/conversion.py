"""Streamed conversion of source shards: row blocks in, codes, scales and FP16 columns out.

Each source tensor becomes one or more output tensors whose sizes follow from its shape, so the output file is laid out
before the first weight is read and memory holds a few row blocks. A tensor that is not quantised keeps its bytes; where
an axis is folded its rows or columns are reordered, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from tqdm import tqdm

from otf_llm.blocks import BLOCK_ELEMENTS, in_order, row_blocks
from otf_llm.calibration_profile import ActivationStatistics, load_statistics
from otf_llm.checkpoint import Checkpoint, TensorInfo
from otf_llm.decoder import Geometry, Role, input_name, matched_linears, read_config, tensor_role, unknown_tensors
from otf_llm.families import HEAD_INPUT, Axis, Family, Kind
from otf_llm.files import sha256
from otf_llm.packing import pack_int4, packed_width
from otf_llm.permutation import Permutation
from otf_llm.quantization import SCALE_DTYPE, dequantize_int4, num_groups, quantize_int4, quantize_int8_rows
from otf_llm.scheme_fit import NIBBLES_PER_WORD, check_scheme, head_treatment
from otf_llm.settings import COMPRESSED_TENSORS, SchemeSettings
from otf_llm.streaming import DTYPES, SafetensorsWriter, TensorSpec

FP16_LARGEST = torch.finfo(torch.float16).max
EXPORTED_SCALES = {"BF16": torch.bfloat16, "F16": torch.float16}  # scales have the model's dtype there
CUDA_BLOCK_ELEMENTS = 1 << 23  # enough to fill a GPU; as float32, 32 MB
CUDA_WORKERS = 8  # enough to keep disk and GPU busy; each holds a block in host memory
# Why a tensor is not quantised.
KEPT_REASONS = {
    Kind.LINEAR: "weights: keep",
    Kind.EMBEDDING: "embedding: keep",
    Kind.HEAD: "lm_head: keep",
    Kind.BIAS: "a bias",
    Kind.NORM: "a norm",
    Kind.HEAD_NORM: "a norm",
    Kind.GATE: "a gate or router, small and sensitive",
    Kind.STATE: "a convolution or decay of linear attention",
    Kind.BUFFER: "a buffer",
    Kind.UNKNOWN: "not in the family's table",
}
TABLES_KEPT = 4  # blocks of neighbouring tensors are under way together


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

    @cached_property
    def kept(self) -> dict[str, str]:
        """The linears that the scheme's ``keep`` names, with the pattern that does; raises ValueError as it must."""
        return matched_linears(self.family, self.geometry, self.scheme.keep)

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, scheme: SchemeSettings, calibrated: list[Path], shards: Iterable[str] = ()
    ) -> Recipe:
        """The recipe for a checkpoint; ``calibrated`` holds the permutation's and the profile's paths, or nothing.

        Statistics are read only for what the source ``shards`` hold, so that memory does not grow with the model.

        Raises ValueError where the scheme does not suit the model (`check_scheme`, `check_foldable`).
        """
        family, geometry = read_config(checkpoint.config)
        check_scheme(scheme, family, geometry)
        permutation = statistics = None
        if scheme.needs_calibration:
            permutation, statistics = Permutation.load(calibrated[0]), {}
        inputs = [json.dumps(scheme.to_dict(), sort_keys=True), *(sha256(path) for path in calibrated)]
        digest = hashlib.sha256("\n".join(inputs).encode()).hexdigest()
        recipe = cls(family, geometry, scheme, permutation, statistics, digest)
        if scheme.needs_calibration:
            statistics |= load_statistics(calibrated[1], recipe.inputs_of(checkpoint, shards))
        check_foldable(recipe, unknown_tensors(family, checkpoint.tensors))
        return recipe

    @property
    def head(self) -> str:
        """``tied``, ``int4`` or ``keep``; raises ValueError as `head_treatment` does."""
        return head_treatment(self.scheme, self.family, self.geometry, self.kept)

    def input_of(self, role: Role) -> str:
        """Global name of the input that a linear or the head reads."""
        return HEAD_INPUT if role.linear is None else input_name(self.family, role.layer, role.linear.reads)

    def inputs_of(self, checkpoint: Checkpoint, shards: Iterable[str]) -> set[str]:
        """Global names of the inputs that linears and the head in these source shards read."""
        roles = {tensor_role(self.family, info.name) for shard in shards for info in checkpoint.shard_tensors(shard)}
        readers = (Kind.LINEAR, Kind.HEAD, Kind.EMBEDDING)  # a tied head is made from the embedding
        return {self.input_of(role) for role in roles if role.kind in readers}


@dataclass(frozen=True)
class _Job:
    """One way in which a source tensor is written.

    ``specs`` are the outputs, ``row`` is the report's row without figures. ``run(writer, start, stop)`` streams the
    source's rows [start, stop) and returns (Σ h(w-ŵ)², Σ h w²) of a quantised block, None of any other.
    """

    info: TensorInfo
    specs: list[TensorSpec]
    row: dict
    run: Callable[[SafetensorsWriter, int, int], tuple[float, float] | None] | None

    def blocks(self, num_elements: int) -> Iterator[tuple[int, int]]:
        """The row blocks in which the source is read, one for a scalar, none where nothing is written."""
        if not self.specs:
            return iter(())
        return row_blocks(self.info.shape or (1,), num_elements)


def convert_shard(
    checkpoint: Checkpoint,
    shards: Sequence[str],
    recipe: Recipe,
    destination: Path,
    *,
    device: str = "cpu",
    workers: int = 1,
) -> dict:
    """Convert the tensors of some source ``shards`` into the one safetensors file ``destination``.

    Args:
        device: where blocks are quantised, ``cpu`` or ``cuda``.
        workers: threads that each take a block at a time; the bytes written do not depend on their number.

    Returns:
        ``sha256`` of the written file, the recipe's digest, and under ``tensors`` one row per output group: ``tensor``
        (source), ``module``, ``action`` (int4, int8, copied, reordered, dropped), ``reason`` for what is not
        quantised, ``outputs`` (name → bytes), and for what is ``relative_error``: Σ h(w-ŵ)² / Σ h w², h = E[x²] for
        linears and 1 for the embedding.

    Raises ValueError naming the tensor for values that the format cannot hold, OSError naming the path when the disk
    has no room or a write fails.
    """
    target = _Device(recipe, device)
    jobs = _plan_shards(checkpoint, shards, recipe, target)
    destination.parent.mkdir(parents=True, exist_ok=True)
    num_elements = BLOCK_ELEMENTS
    if device == "cuda":
        num_elements, workers = CUDA_BLOCK_ELEMENTS, min(workers, CUDA_WORKERS)
    with SafetensorsWriter(destination, _specs(jobs), hashed=True) as writer:
        figures = _run(jobs, writer, destination.name, num_elements, workers, target)
    rows = []
    for job, sums in zip(jobs, figures, strict=True):
        outputs = {spec.name: spec.size_bytes for spec in job.specs}
        row = {"tensor": job.info.name, "source_bytes": job.info.size_bytes, **job.row}
        if sums:
            error, energy = (math.fsum(column) for column in zip(*sums, strict=True))
            row["relative_error"] = error / energy if energy else 0.0
        rows.append(row | {"outputs": outputs})
    return {"sha256": writer.sha256, "recipe": recipe.digest, "tensors": rows}


def converted_size(checkpoint: Checkpoint, shards: Iterable[str], recipe: Recipe) -> int:
    """Bytes of the file that source shards are converted into, from shapes alone."""
    jobs = _plan_shards(checkpoint, shards, recipe, _Device(recipe, "cpu"))
    return SafetensorsWriter(Path(), _specs(jobs)).size_bytes


def _plan_shards(checkpoint: Checkpoint, shards: Iterable[str], recipe: Recipe, device: _Device) -> list[_Job]:
    tensors = [info for shard in shards for info in checkpoint.shard_tensors(shard)]
    return [job for info in tensors for job in _plan(checkpoint, info, recipe, device)]


def _specs(jobs: list[_Job]) -> list[TensorSpec]:
    return [spec for job in jobs for spec in job.specs]


def _run(
    jobs: list[_Job], writer: SafetensorsWriter, title: str, num_elements: int, workers: int, device: _Device
) -> list[list[tuple[float, float]]]:
    """Run every block of every job; what the blocks returned, per job and in their order."""
    figures: list[list[tuple[float, float]]] = [[] for _ in jobs]
    tasks = ((index, start, stop) for index, job in enumerate(jobs) for start, stop in job.blocks(num_elements))

    def run(task: tuple[int, int, int]) -> tuple[float, float] | None:
        index, start, stop = task
        try:
            with device.stream():
                return jobs[index].run(writer, start, stop)
        except ValueError as error:
            raise ValueError(f"{jobs[index].info.name}: {error}") from error

    total = sum(job.info.size_bytes for job in jobs if job.specs)
    with tqdm(total=total, unit="B", unit_scale=True, desc=title) as bar:
        for (index, start, stop), sums in in_order(run, tasks, workers):
            if sums is not None:
                figures[index].append(sums)
            info = jobs[index].info
            bar.update(info.size_bytes * (stop - start) // (info.shape or (1,))[0])
    return figures


class _Device:
    """Where blocks are quantised: what they need there, and how they get there. The last few orders are kept.

    On a GPU every thread has a stream and a page-locked buffer, so that reading, copying and computing overlap.
    """

    def __init__(self, recipe: Recipe, device: str):
        self.recipe, self.device = recipe, device
        self._thread = threading.local()
        self.of_input = lru_cache(TABLES_KEPT)(self._of_input)
        self.places = lru_cache(TABLES_KEPT)(self._places)
        self.dense = lru_cache(TABLES_KEPT)(self._dense)

    def _of_input(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Source columns in stored order, int64 [K], and E[x²] of each, float32 [K] (ones where none was ever seen)."""
        columns = self.recipe.permutation.columns(name)
        mean_square = self.recipe.statistics[name].mean_square().float()
        importance = mean_square if mean_square.any() else torch.ones_like(mean_square)
        columns = torch.arange(len(importance)) if columns is None else columns
        return columns.to(self.device), importance[columns].to(self.device)

    def stream(self) -> AbstractContextManager:
        """The thread's own stream; blocks are computed inside it."""
        if self.device == "cpu":
            return nullcontext()
        if not hasattr(self._thread, "stream"):
            self._thread.stream = torch.cuda.Stream()
        return torch.cuda.stream(self._thread.stream)

    def read(self, checkpoint: Checkpoint, info: TensorInfo, start: int, stop: int) -> torch.Tensor:
        """Rows of a source tensor, float32 on the device. The thread's last block must be done with."""
        if self.device == "cpu":
            return checkpoint.read_rows(info.name, start, stop).float()
        size = info.size_bytes // info.shape[0] * (stop - start)
        buffer = getattr(self._thread, "buffer", None)
        if buffer is None or len(buffer) < size:
            self._thread.buffer = buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return checkpoint.read_rows(info.name, start, stop, buffer).to(self.device, non_blocking=True).float()

    def _places(self, role: Role) -> torch.Tensor | None:
        """Where each source row goes, int64 [N]; None where rows stay."""
        rows = None if self.recipe.permutation is None else self.recipe.permutation.rows(role)
        return None if rows is None else torch.argsort(rows)

    def _dense(self, role: Role) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Source columns in stored order of a tensor that stays dense, and where its rows go; None what stays."""
        return _fold_orders(self.recipe.permutation, self.recipe, role)[1], self.places(role)


def _plan(checkpoint: Checkpoint, info: TensorInfo, recipe: Recipe, device: _Device) -> list[_Job]:
    role = tensor_role(recipe.family, info.name)
    scheme = recipe.scheme
    module = info.name.removesuffix(".weight")
    if role.kind is Kind.LINEAR and scheme.weights == "int4" and module not in recipe.kept:
        return [_int4(checkpoint, info, recipe, role, module, device)]
    if role.kind is Kind.EMBEDDING:
        if scheme.embedding == "int8":
            jobs = [_int8_embedding(checkpoint, info, recipe, info.name.removesuffix(".weight"), device)]
        else:
            jobs = [_copied(checkpoint, info, recipe, role, info.name, device)]
        if recipe.geometry.tied:
            jobs += _head_of_tied_model(checkpoint, info, recipe, device)
        return jobs
    if role.kind is Kind.HEAD and recipe.geometry.tied:
        return [_Job(info, [], {"action": "dropped", "reason": "equal to the tied embedding"}, None)]
    if role.kind is Kind.HEAD and recipe.head == "int4":
        return [_int4(checkpoint, info, recipe, role, recipe.family.head, device)]
    if role.kind is Kind.LEFT_OUT:
        return [_Job(info, [], {"action": "dropped", "reason": "not of the language model"}, None)]
    return [_copied(checkpoint, info, recipe, role, recipe.family.saved_name(info.name), device)]


def _head_of_tied_model(checkpoint: Checkpoint, info: TensorInfo, recipe: Recipe, device: _Device) -> list[_Job]:
    """A tied model's head is made from the embedding matrix, unless it goes on reading the embedding's own table."""
    role = Role(Kind.HEAD)
    if recipe.head == "int4":
        return [_int4(checkpoint, info, recipe, role, recipe.family.head, device)]
    if recipe.head == "keep" and recipe.scheme.embedding != "keep":
        return [_copied(checkpoint, info, recipe, role, f"{recipe.family.head}.weight", device)]
    return []


def _int4(checkpoint: Checkpoint, info: TensorInfo, recipe: Recipe, role: Role, module: str, device: _Device) -> _Job:
    name = recipe.input_of(role)
    order = recipe.permutation.inputs[name]
    num_rows, outliers = info.shape[0], order.num_outliers
    background = order.in_features - outliers
    # BF16 keeps what FP16 cannot hold; the largest weight of these columns is known from the permute stage.
    outlier_dtype = torch.float16 if order.largest_outlier <= FP16_LARGEST else torch.bfloat16
    group_size = recipe.scheme.group_size
    scales_shape = (num_rows, num_groups(background, group_size))
    exported = recipe.scheme.export == COMPRESSED_TENSORS
    if exported:
        scale_dtype = EXPORTED_SCALES.get(info.dtype, torch.float32)
        packed, scale_name = f"{module}.weight_packed", f"{module}.weight_scale"
        specs = [
            TensorSpec(packed, torch.int32, (num_rows, background // NIBBLES_PER_WORD)),
            TensorSpec(scale_name, scale_dtype, scales_shape),
            TensorSpec(f"{module}.weight_shape", torch.int64, (2,)),
        ]
    else:
        scale_dtype, packed, scale_name = SCALE_DTYPE, f"{module}.codes", f"{module}.scales"
        specs = [
            TensorSpec(packed, torch.uint8, (num_rows, packed_width(background))),
            TensorSpec(scale_name, scale_dtype, scales_shape),
            TensorSpec(f"{module}.outliers", outlier_dtype, (num_rows, outliers)),
        ]
    row = {
        "action": "int4",
        "module": module,
        "shape": list(info.shape),
        "input": name,
        "num_outliers": outliers,
        "outlier_dtype": str(outlier_dtype).removeprefix("torch."),
    }

    def run(writer: SafetensorsWriter, start: int, stop: int) -> tuple[float, float]:
        columns, importance = device.of_input(name)
        places = device.places(role)
        block = device.read(checkpoint, info, start, stop)
        kept, rest = block.index_select(1, columns[:outliers]), block.index_select(1, columns[outliers:])
        search = importance[outliers:] if recipe.scheme.scale_search else None
        codes, scales = quantize_int4(rest, group_size, search, scale_dtype)
        where = None if places is None else places[start:stop]
        nibbles = pack_int4(codes)
        writer.write_rows(packed, nibbles.view(torch.int32) if exported else nibbles, start, where)
        writer.write_rows(scale_name, scales, start, where)
        if not exported:
            writer.write_rows(f"{module}.outliers", kept.to(outlier_dtype), start, where)
        elif start == 0:
            writer.write(f"{module}.weight_shape", torch.tensor(info.shape))
        difference = dequantize_int4(codes, scales, group_size).sub_(rest)
        error = _weighted_square(difference, importance[outliers:])
        return error, _weighted_square(rest, importance[outliers:]) + _weighted_square(kept, importance[:outliers])

    return _Job(info, specs, row, run)


def _weighted_square(matrix: torch.Tensor, weights: torch.Tensor) -> float:
    """Σ h m² of float32 [N, K] with weights h [K]: float32 in a row, float64 over rows. Overwrites the matrix."""
    return torch.mv(matrix.square_(), weights).sum(dtype=torch.float64).item()


def _int8_embedding(checkpoint: Checkpoint, info: TensorInfo, recipe: Recipe, module: str, device: _Device) -> _Job:
    specs = [
        TensorSpec(f"{module}.codes", torch.int8, info.shape),
        TensorSpec(f"{module}.scales", SCALE_DTYPE, info.shape[:1]),
    ]
    columns = None if recipe.permutation is None else recipe.permutation.residual()
    columns = None if columns is None else columns.to(device.device)

    def run(writer: SafetensorsWriter, start: int, stop: int) -> tuple[float, float]:
        block = device.read(checkpoint, info, start, stop)
        block = block if columns is None else block.index_select(1, columns)
        codes, scales = quantize_int8_rows(block)
        writer.write_rows(f"{module}.codes", codes, start)
        writer.write_rows(f"{module}.scales", scales, start)
        energy = block.square().sum(dtype=torch.float64).item()
        return block.sub_(codes * scales.float()[:, None]).square_().sum(dtype=torch.float64).item(), energy

    return _Job(info, specs, {"action": "int8", "module": module, "shape": list(info.shape)}, run)


def _copied(checkpoint: Checkpoint, info: TensorInfo, recipe: Recipe, role: Role, name: str, device: _Device) -> _Job:
    rows, columns = _fold_orders(recipe.permutation, recipe, role)
    moved = rows is not None or columns is not None
    reason = KEPT_REASONS[role.kind]
    if name.removesuffix(".weight") in recipe.kept:
        reason = f"keep: {recipe.kept[name.removesuffix('.weight')]}"
    row = {"action": "reordered" if moved else "copied", "shape": list(info.shape), "reason": reason}

    def run(writer: SafetensorsWriter, start: int, stop: int) -> None:
        if not info.shape:
            writer.write(name, checkpoint.read(info.name))
            return
        columns, places = device.dense(role)
        block = checkpoint.read_rows(info.name, start, stop)
        block = block if columns is None else block[:, columns]
        writer.write_rows(name, block, start, None if places is None else places[start:stop])

    return _Job(info, [TensorSpec(name, DTYPES[info.dtype], info.shape)], row, run)


def _fold_orders(
    permutation: Permutation | None, recipe: Recipe, role: Role
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Row and column order of a tensor that stays dense: folded axes only, for a dense linear gathers nothing."""
    if permutation is None:
        return None, None
    columns = None
    if role.kind in (Kind.EMBEDDING, Kind.HEAD, Kind.GATE):
        columns = permutation.residual()
    elif role.kind is Kind.LINEAR:
        columns = permutation.folded_columns(recipe.input_of(role))
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
