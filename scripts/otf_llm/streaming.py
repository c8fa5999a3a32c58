"""A safetensors writer that knows every size before it sees a byte.

A quantised tensor's size follows from its shape alone, so the header is written first and each tensor is then put in
its place, whole or in blocks of rows, in any order. Nothing is ever held but the block in hand.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from otf_llm.files import atomic_path
from otf_llm.written_hash import WrittenHash

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
GATHERED_BYTES = 1 << 24  # tensors up to here wait in memory for rows in another order: a write a row is slow
ALIGNMENT = 8  # bytes; headers are padded to it and tensors begin at multiples of it, so that they can be mapped


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor's data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SafetensorsWriter:
    """Writes one safetensors file in place: header from the specs, then rows of any tensor in any order.

    Use as a context manager; threads may write blocks at once. The file appears under its name only when every byte of
    every tensor has been written and synced; on an error nothing is left behind. The bytes depend on the specs, the
    metadata and the data alone: tensors lie in the order of their specs, but for those whose length would leave the
    next one unaligned, which come last. With ``hashed``, ``sha256`` of the file is known when it is complete.

    Raises ValueError when a block does not fit its spec or a tensor was left incomplete, OSError naming the path when
    the disk refuses.
    """

    def __init__(
        self, path: Path, specs: list[TensorSpec], metadata: dict[str, str] | None = None, *, hashed: bool = False
    ):
        self.path, self.hashed, self.sha256 = Path(path), hashed, ""
        self._specs = {spec.name: spec for spec in specs}
        if len(self._specs) != len(specs):
            raise ValueError(f"{path}: a tensor name is given twice")
        odd = [spec for spec in specs if spec.size_bytes % ALIGNMENT]
        ordered = [spec for spec in specs if spec.size_bytes % ALIGNMENT == 0]
        ordered += sorted(odd, key=lambda spec: -spec.dtype.itemsize)
        header: dict = {"__metadata__": dict(sorted({"format": "pt", **(metadata or {})}.items()))}
        offset, starts = 0, {}
        for spec in ordered:
            starts[spec.name] = offset
            header[spec.name] = {
                "dtype": DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + spec.size_bytes],
            }
            offset += spec.size_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        self._header = len(text).to_bytes(8, "little") + text
        self._starts = {name: start + len(self._header) for name, start in starts.items()}
        self._accounting = threading.Lock()
        self._missing = {spec.name: spec.size_bytes for spec in specs}
        self._ordered: dict[str, bool] = {}  # whether a tensor's rows come in another order
        self._gathered: dict[str, torch.Tensor] = {}  # those of them that are small, until all rows are there
        self.size_bytes = len(self._header) + offset
        self.header_bytes = len(self._header)

    def __enter__(self) -> SafetensorsWriter:
        self._scope = ExitStack()
        with self._scope:
            partial = self._scope.enter_context(atomic_path(self.path))
            self._file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            self._scope.callback(os.close, self._file)
            if self.hashed:
                self._hash = WrittenHash(self._file)
                self._scope.callback(self._hash.close)
            self._put(0, self._header)
            self._wrote(0, len(self._header))
            self._scope = self._scope.pop_all()
        return self

    def __exit__(self, kind, error, traceback) -> bool | None:
        with self._scope:
            if kind is not None:
                return self._scope.__exit__(kind, error, traceback)
            incomplete = [name for name, missing in self._missing.items() if missing]
            if incomplete:
                raise ValueError(f"{self.path}: {len(incomplete)} tensors were not written whole: {incomplete[:3]}")
            if self.hashed:
                self.sha256 = self._hash.finish()

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a whole tensor; shape and dtype must be those of its spec."""
        spec = self._specs[name]
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise ValueError(
                f"{name}: got {tensor.dtype} {list(tensor.shape)}, expected {spec.dtype} {list(spec.shape)}"
            )
        data = _bytes_of(tensor)
        self._put(self._starts[name], data)
        self._account(name, 0, len(data))

    def write_rows(self, name: str, rows: torch.Tensor, start: int, order: torch.Tensor | None = None) -> None:
        """Write ``rows`` [R, ...] as rows start … start + R - 1, or, with ``order`` (int64 [R]), as rows ``order``.

        Raises ValueError for rows that do not fit, and for a tensor whose blocks come partly with an order.
        """
        spec = self._specs[name]
        if tuple(rows.shape[1:]) != spec.shape[1:] or rows.dtype != spec.dtype:
            raise ValueError(f"{name}: a block of {rows.dtype} {list(rows.shape)} does not fit {spec}")
        if self._ordered.setdefault(name, order is not None) != (order is not None):
            raise ValueError(f"{name}: some of its blocks come with an order and some without")
        row_bytes = spec.size_bytes // spec.shape[0] if spec.shape[0] else 0
        if order is None:
            if start + rows.shape[0] > spec.shape[0]:
                raise ValueError(f"{name}: rows {start}..{start + rows.shape[0]} of {spec.shape[0]}")
            data = _bytes_of(rows)
            self._put(self._starts[name] + start * row_bytes, data)
            self._account(name, start * row_bytes, len(data))
        elif row_bytes == 0:
            return
        elif spec.size_bytes <= GATHERED_BYTES:
            with self._accounting:
                if name not in self._gathered:
                    self._gathered[name] = torch.empty(spec.shape, dtype=spec.dtype)
            whole = self._gathered[name].index_copy_(0, order.cpu(), rows.cpu())
            if self._account(name, None, len(rows) * row_bytes):
                self._put(self._starts[name], _bytes_of(whole))
                del self._gathered[name]
                self._wrote_whole(name)
        else:
            view = _bytes_of(rows)
            for first, last, row in _runs(order):
                self._put(self._starts[name] + row * row_bytes, view[first * row_bytes : last * row_bytes])
            if self._account(name, None, len(view)):
                self._wrote_whole(name)

    def _account(self, name: str, start: int | None, written: int) -> bool:
        """Note that bytes of a tensor came, from its byte ``start`` on, or here and there (None); whether all have."""
        with self._accounting:
            self._missing[name] -= written
            missing = self._missing[name]
        if missing < 0:
            raise ValueError(f"{name}: more rows were written than {self._specs[name]} holds")
        if start is not None:
            self._wrote(self._starts[name] + start, self._starts[name] + start + written)
        return missing == 0

    def _wrote_whole(self, name: str) -> None:
        self._wrote(self._starts[name], self._starts[name] + self._specs[name].size_bytes)

    def _wrote(self, start: int, stop: int) -> None:
        if self.hashed:
            self._hash.add(start, stop)

    def _put(self, offset: int, data) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file, view, offset)
            view, offset = view[written:], offset + written


def _runs(order: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(first, last, row): positions [first, last) of ``order`` that hold row, row + 1, row + 2 …"""
    breaks = (order.diff() != 1).nonzero().flatten().add_(1).tolist()
    edges = [0, *breaks, len(order)] if len(order) else []
    rows = order.tolist()
    return ((first, last, rows[first]) for first, last in pairwise(edges))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy())


def save_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict | None = None) -> None:
    """Save small tensors deterministically; ``metadata`` is any JSON value, kept under the key ``otf``.

    (safetensors' own ``save_file`` writes metadata keys in a random order.)
    """
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sorted(tensors.items())]
    text = {} if metadata is None else {"otf": json.dumps(metadata, sort_keys=True, separators=(",", ":"))}
    path.parent.mkdir(parents=True, exist_ok=True)
    with SafetensorsWriter(path, specs, text) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


def load_tensors(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> tuple[dict[str, torch.Tensor], dict]:
    """Load what ``save_tensors`` wrote: the ``wanted`` tensors and the metadata value ({} where there is none).

    Raises ValueError naming the file when it is not a safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys()) if wanted(name)}
            metadata = json.loads((file.metadata() or {}).get("otf", "{}"))
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
    return tensors, metadata
