"""A Hugging Face checkpoint folder of safetensors: checked as it is opened, read by rows, described by a manifest.

Everything that can be wrong with the files' structure is found from names, sizes and headers before one weight is read.
Weights are read with plain file reads: a memory-mapped shard would count as this process's memory while any view of it
lives, and a file that shrinks under a mapping kills the process.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from otf_llm.blocks import row_blocks
from otf_llm.files import LFS_POINTER, parse_json_object, read_json_object, sha256
from otf_llm.shards import CONFIG_NAME, HEADER_LIMIT_BYTES, INDEX_NAME, layout, side_files
from otf_llm.streaming import DTYPES

LENGTH_BYTES = 8  # little-endian length of the header, at the start of the file

# Names under which fp8, GPTQ, AWQ, compressed-tensors and bitsandbytes store scales or packed codes.
QUANTISED_NAME = re.compile(r"(_scale_inv|\.(input_scale|weight_scale|weight_packed|qweight|qzeros|absmax))$")
LOW_PRECISION = re.compile(r"F([468])(_|$)")

# dtype -> (unsigned integer of its width, exponent bits, mantissa bits). All exponent bits set: Inf, or NaN if any
# mantissa bit is set too.
FLOAT_BITS = {
    "F16": (np.uint16, 0x7C00, 0x03FF),
    "BF16": (np.uint16, 0x7F80, 0x007F),
    "F32": (np.uint32, 0x7F800000, 0x007FFFFF),
    "F64": (np.uint64, 0x7FF0000000000000, 0x000FFFFFFFFFFFFF),
}
SCAN_BLOCK_BYTES = 1 << 24  # bounds memory while a manifest is built; a multiple of every element size


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: safetensors dtype ("BF16"), shape, shard file name, absolute byte offset in it, bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    offset: int
    size_bytes: int

    @property
    def num_elements(self) -> int:
        """Number of elements, 1 for a scalar."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint folder: ``shards`` are file names in order, ``tensors`` every stored tensor by name."""

    folder: Path
    config: dict
    shards: tuple[str, ...]
    tensors: dict[str, TensorInfo]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Check the folder's config, index, shard sizes and headers, reading no weights.

        Raises ValueError naming the file, and the tensor where there is one, when anything is missing, damaged,
        contradictory or already quantised.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder")
        config = read_json_object(folder / CONFIG_NAME)
        _refuse_quantised_config(config, folder / CONFIG_NAME)
        weight_map, shards = layout(folder)
        tensors: dict[str, TensorInfo] = {}
        for shard in shards:
            for info in read_header(folder / shard):
                if info.name in tensors:
                    first = tensors[info.name].shard
                    raise ValueError(f"{folder}: {info.name} is stored twice, in {first} and in {shard}")
                tensors[info.name] = info
        if weight_map is not None:
            _check_index(folder, weight_map, tensors)
        if not tensors:
            raise ValueError(f"{folder}: {', '.join(shards)} holds no tensors")
        return cls(folder, config, shards, tensors)

    def info(self, name: str) -> TensorInfo:
        """Place of a tensor. Raises ValueError if the checkpoint has none of that name."""
        if name not in self.tensors:
            raise ValueError(f"{self.folder}: there is no tensor {name}")
        return self.tensors[name]

    def read(self, name: str) -> Tensor:
        """A whole tensor in its stored dtype and shape, in memory of its own."""
        info = self.info(name)
        return self._read_bytes(info, 0, info.size_bytes).view(DTYPES[info.dtype]).reshape(info.shape)

    def read_as(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """A whole tensor in another dtype and on a device, converted block by block."""
        info = self.info(name)
        if not info.shape:
            return self.read(name).to(device, dtype)
        result = torch.empty(info.shape, dtype=dtype, device=device)
        for start, stop in row_blocks(info.shape):
            result[start:stop] = self.read_rows(name, start, stop).to(device)
        return result

    def read_rows(self, name: str, start: int, stop: int, buffer: Tensor | None = None) -> Tensor:
        """Rows [stop - start, ...] of a tensor, reading only their bytes; into ``buffer``, uint8 [≥ bytes], if given.

        Raises ValueError unless 0 <= start <= stop <= rows, and for a scalar.
        """
        info = self.info(name)
        if not info.shape or not 0 <= start <= stop <= info.shape[0]:
            raise ValueError(f"{name}: rows {start} to {stop} asked of a tensor of shape {list(info.shape)}")
        row_bytes = info.size_bytes // info.shape[0] if info.shape[0] else 0
        data = self._read_bytes(info, start * row_bytes, (stop - start) * row_bytes, buffer)
        return data.view(DTYPES[info.dtype]).reshape(stop - start, *info.shape[1:])

    def shard_tensors(self, shard: str) -> list[TensorInfo]:
        """Tensors of one shard in the order of their bytes. Raises ValueError for a shard that is not the folder's."""
        if shard not in self.shards:
            raise ValueError(f"{self.folder}: {shard} is not one of its shards ({', '.join(self.shards)})")
        found = [info for info in self.tensors.values() if info.shard == shard]
        return sorted(found, key=lambda info: (info.offset, info.size_bytes))

    def shard_bytes(self, shards: Iterable[str]) -> int:
        """Bytes of all tensors in some of its shards."""
        return sum(info.size_bytes for shard in shards for info in self.shard_tensors(shard))

    def side_files(self) -> list[str]:
        """Sorted names of the folder's files that are not weights (`otf_llm.shards.side_files`)."""
        return side_files(self.folder)

    def _read_bytes(self, info: TensorInfo, start: int, count: int, buffer: Tensor | None = None) -> Tensor:
        data = torch.empty(count, dtype=torch.uint8) if buffer is None else buffer[:count]
        with open(self.folder / info.shard, "rb") as file:
            file.seek(info.offset + start)
            read = file.readinto(data.numpy())
        if read != count:
            raise ValueError(f"{self.folder / info.shard}: holds {read} of {count} bytes of {info.name}: it changed")
        return data


def read_header(path: Path) -> list[TensorInfo]:
    """Tensors of a safetensors file in the order of their bytes, checked against the file's size.

    Raises ValueError if the file is not safetensors, is truncated or too long, if tensors overlap or leave gaps, or if
    a dtype is quantised or unknown. Source: the safetensors format description (8-byte length, JSON header, data).
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(512)
        _refuse_lookalike(path, start, size)
        length = int.from_bytes(start[:LENGTH_BYTES], "little")
        if length > HEADER_LIMIT_BYTES:
            claim = f"its header would have {length} bytes, the limit is {HEADER_LIMIT_BYTES}"
            raise ValueError(f"{path}: not a safetensors file: {claim}")
        if LENGTH_BYTES + length > size:
            raise ValueError(f"{path}: truncated: its header ends at byte {LENGTH_BYTES + length}, the file has {size}")
        file.seek(LENGTH_BYTES)
        text = file.read(length)
    if not text.startswith(b"{"):
        raise ValueError(f"{path}: not a safetensors file: its header does not start with '{{'")
    entries = parse_json_object(text, f"{path}: the safetensors header")
    _check_metadata(path, entries.pop("__metadata__", {}))
    found = [_parse_entry(path, name, entry, LENGTH_BYTES + length) for name, entry in entries.items()]
    found.sort(key=lambda info: (info.offset, info.size_bytes))
    _check_extent(path, found, LENGTH_BYTES + length, size)
    return found


def build_manifest(checkpoint: Checkpoint, family: str, progress: bool = True) -> dict:
    """Describe a checkpoint by the SHA-256 of its files and its tensor table, reading every file once.

    The same pass looks for NaN and Inf. ``digest`` is the SHA-256 of the files' sorted [name, SHA-256] pairs as compact
    JSON: the model's name in tables. Holds no path and no date, so equal checkpoints give equal manifests.

    Raises ValueError naming every tensor that holds NaN or Inf with both counts, and for a config without architecture.
    """
    architectures = checkpoint.config.get("architectures")
    if not (isinstance(architectures, list) and len(architectures) == 1 and isinstance(architectures[0], str)):
        raise ValueError(f"{checkpoint.folder / CONFIG_NAME}: architectures must name one class, got {architectures!r}")
    beside = checkpoint.side_files()
    sizes = {name: (checkpoint.folder / name).stat().st_size for name in (*checkpoint.shards, *beside)}
    digests, bad = {}, {}
    with tqdm(total=sum(sizes.values()), desc="manifest", unit="B", unit_scale=True, disable=not progress) as bar:
        for shard in checkpoint.shards:
            digests[shard], bad_here = _hash_and_scan(checkpoint, shard, sizes[shard], bar)
            bad |= bad_here
        for name in beside:
            digests[name] = sha256(checkpoint.folder / name)
            bar.update(sizes[name])
    if bad:
        listing = "; ".join(f"{name}: {nan} NaN, {inf} Inf" for name, (nan, inf) in bad.items())
        raise ValueError(f"{checkpoint.folder}: weights are not finite: {listing}")
    return {
        "architecture": architectures[0],
        "digest": hashlib.sha256(json.dumps(sorted(digests.items()), separators=(",", ":")).encode()).hexdigest(),
        "family": family,
        "files": {name: {"sha256": digests[name], "size_bytes": sizes[name]} for name in sorted(sizes)},
        "num_parameters": sum(info.num_elements for info in checkpoint.tensors.values() if info.dtype in FLOAT_BITS),
        "shards": list(checkpoint.shards),
        "tensors": _tensor_table(checkpoint),
    }


def verify_against_manifest(checkpoint: Checkpoint, manifest: dict) -> None:
    """Check from names, sizes and headers that a checkpoint is still the one its manifest describes.

    Raises ValueError naming the first file or tensor that differs.
    """
    again = "the source changed since its manifest was made; make the manifest again"
    present = {*checkpoint.shards, *checkpoint.side_files()}
    for name in sorted(present | set(manifest["files"])):
        if name not in present:
            raise ValueError(f"{checkpoint.folder / name}: gone; {again}")
        if name not in manifest["files"]:
            raise ValueError(f"{checkpoint.folder / name}: not in the manifest; {again}")
        size, expected = (checkpoint.folder / name).stat().st_size, manifest["files"][name]["size_bytes"]
        if size != expected:
            raise ValueError(f"{checkpoint.folder / name}: has {size} bytes, the manifest says {expected}; {again}")
    table = _tensor_table(checkpoint)
    for name in sorted(table.keys() | manifest["tensors"].keys()):
        stored, expected = table.get(name), manifest["tensors"].get(name)
        if stored != expected:
            file = checkpoint.folder / (stored or expected)["shard"]
            raise ValueError(f"{file}: {name} is {stored}, the manifest says {expected}; {again}")


def _tensor_table(checkpoint: Checkpoint) -> dict[str, dict]:
    return {
        name: {"dtype": info.dtype, "shape": list(info.shape), "shard": info.shard}
        for name, info in sorted(checkpoint.tensors.items())
    }


def _hash_and_scan(checkpoint: Checkpoint, shard: str, size: int, bar: tqdm) -> tuple[str, dict[str, tuple[int, int]]]:
    """SHA-256 of a shard, and the (NaN, Inf) counts of each of its tensors that is not finite."""
    path = checkpoint.folder / shard
    digest, bad = hashlib.sha256(), {}
    buffer = np.empty(SCAN_BLOCK_BYTES, dtype=np.uint8)

    def blocks(count: int) -> Iterable[np.ndarray]:
        while count:
            block = buffer[: min(count, SCAN_BLOCK_BYTES)]
            if file.readinto(block) != len(block):
                raise ValueError(f"{path}: shrank below {size} bytes while it was read")
            digest.update(block)
            bar.update(len(block))
            count -= len(block)
            yield block

    tensors = checkpoint.shard_tensors(shard)
    with open(path, "rb") as file:
        for _ in blocks(size - sum(info.size_bytes for info in tensors)):  # the header
            pass
        for info in tensors:
            counts = [count_nonfinite(block, info.dtype) for block in blocks(info.size_bytes)]
            nan, inf = sum(nan for nan, _ in counts), sum(inf for _, inf in counts)
            if nan or inf:
                bad[info.name] = (nan, inf)
    return digest.hexdigest(), bad


def count_nonfinite(data: np.ndarray, dtype: str) -> tuple[int, int]:
    """Numbers of NaN and of ±Inf in raw bytes (uint8 [n]) of a safetensors dtype; (0, 0) for integers."""
    if dtype not in FLOAT_BITS:
        return 0, 0
    kind, exponent, mantissa = FLOAT_BITS[dtype]
    bits = data.view(kind)
    special = (bits & kind(exponent)) == kind(exponent)
    if not special.any():
        return 0, 0
    nan = int(np.count_nonzero(bits[special] & kind(mantissa)))
    return nan, int(np.count_nonzero(special)) - nan


def _check_index(folder: Path, weight_map: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    """Compare the index with the headers: every tensor in its shard, none unlisted."""
    index = folder / INDEX_NAME
    for name, shard in weight_map.items():
        if name not in tensors:
            raise ValueError(f"{index}: maps {name} to {shard}, whose header lacks it, as does every other shard")
        if tensors[name].shard != shard:
            raise ValueError(f"{index}: wrong shard: maps {name} to {shard}, but it is stored in {tensors[name].shard}")
    unlisted = [name for name in tensors if name not in weight_map]
    if unlisted:
        listing = ", ".join(f"{name} in {tensors[name].shard}" for name in unlisted[:5])
        listing += f" and {len(unlisted) - 5} more" if len(unlisted) > 5 else ""
        raise ValueError(f"{index}: unlisted tensors, stored but absent from the index: {listing}")


def _refuse_quantised_config(config: dict, path: Path) -> None:
    text_config = config.get("text_config")
    for part in (config, text_config if isinstance(text_config, dict) else {}):
        settings = part.get("quantization_config") or part.get("compression_config")
        if settings:
            method = settings.get("quant_method", "unnamed method") if isinstance(settings, dict) else settings
            raise ValueError(f"{path}: an already quantised ({method}) source is not supported; use the original")


def _refuse_lookalike(path: Path, start: bytes, size: int) -> None:
    if size == 0:
        raise ValueError(f"{path}: empty (0 bytes), not a safetensors file")
    if start.startswith(LFS_POINTER):
        raise ValueError(f"{path}: this is a Git LFS pointer of {size} bytes, not the weights; run git lfs pull")
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise ValueError(f"{path}: this is a web page, not a safetensors file; download it again")
    if size < LENGTH_BYTES:
        raise ValueError(f"{path}: not a safetensors file: {size} bytes, its header length alone takes {LENGTH_BYTES}")


def _check_metadata(path: Path, metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{path}: the header's __metadata__ is not a table of strings")


def _parse_entry(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    """One tensor of a header, its offsets consistent with its dtype and shape."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{path}: {name} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    low = LOW_PRECISION.match(dtype) if isinstance(dtype, str) else None
    if low or QUANTISED_NAME.search(name):
        method = f"fp{low[1]}" if low else "fp8" if name.endswith("_scale_inv") else "packed"
        raise ValueError(f"{path}: {name} ({dtype}): an already quantised ({method}) source is not supported")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{path}: {name} has dtype {dtype!r}; supported are {', '.join(DTYPES)}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{path}: {name} has shape {shape!r} and offsets {offsets!r}; both must hold sizes")
    size_bytes = DTYPES[dtype].itemsize * math.prod(shape)
    if offsets[1] - offsets[0] != size_bytes:
        raise ValueError(f"{path}: {name}, {dtype} {shape}, takes {size_bytes} bytes; its offsets are {offsets}")
    return TensorInfo(name, dtype, tuple(shape), path.name, data_start + offsets[0], size_bytes)


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_extent(path: Path, tensors: list[TensorInfo], data_start: int, size: int) -> None:
    """The tensors must tile the file from the header's end to the last byte."""
    end = max((info.offset + info.size_bytes for info in tensors), default=data_start)
    if end != size:
        fault = "truncated" if size < end else "too long"
        raise ValueError(f"{path}: {fault}: header and tensors take {end} bytes, the file has {size}")
    cursor = data_start
    for info in tensors:
        if info.offset != cursor:
            fault = "overlaps the tensor before it" if info.offset < cursor else "leaves a gap before it"
            raise ValueError(f"{path}: {info.name} {fault}: it starts at byte {info.offset}, expected {cursor}")
        cursor += info.size_bytes
