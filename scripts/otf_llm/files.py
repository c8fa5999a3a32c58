"""Files and folders that appear whole or not at all, JSON read strictly, and checksums."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Errors that say the disk, the quota or the file size limit is exhausted; a user acts on the path, not on the call.
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
LFS_POINTER = b"version https://git-lfs"  # what a clone holds in place of a file that Git LFS did not fetch


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a hidden path beside ``path`` to write to; it takes the name ``path`` when the block ends without an error.

    The data is synced before the rename. On any error the partial file is removed and ``path`` stays as it was.
    Raises OSError naming ``path`` when the disk, quota or file size limit is exhausted.
    """
    path = Path(path)
    partial = _partial(path)
    try:
        with _naming(path):
            yield partial
            _sync(partial)
            os.replace(partial, path)
            _sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a hidden, empty folder beside ``path``; it replaces ``path`` when the block ends without an error.

    A folder already at ``path`` is kept until then. On any error the partial folder is removed. Raises OSError naming
    ``path`` when the disk, quota or file size limit is exhausted.
    """
    path = Path(path)
    partial = _partial(path)
    partial.mkdir()
    try:
        with _naming(path):
            yield partial
            for file in sorted(partial.rglob("*")):
                _sync(file)
            if path.exists():
                shutil.rmtree(path)
            os.replace(partial, path)
            _sync(path.parent)
    finally:
        if partial.exists():
            shutil.rmtree(partial)


def check_writable(folder: Path) -> None:
    """Raises OSError naming what stands in the way of writing under ``folder``, which need not exist yet."""
    folder = Path(folder).absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise OSError(errno.ENOTDIR, "results cannot be written: it is no folder", str(folder))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, "results cannot be written: the folder is read-only", str(folder))


def check_space(folder: Path, files: dict[str, int]) -> tuple[int, int]:
    """Bytes that the ``files`` (name → size) still need in ``folder``, and bytes that are free for them.

    Files that are there need nothing, and what others have written of theirs so far is counted as free.

    Raises OSError naming the folder when the need is larger.
    """
    missing = {name: size for name, size in files.items() if not (folder / name).exists()}
    needed = sum(missing.values())
    written = sum(
        part.stat().st_blocks * 512 for name in missing for part in folder.glob(f".{glob.escape(name)}.*.partial")
    )
    free = shutil.disk_usage(folder).free + written
    if needed > free:
        told = f"{needed / 1e6:,.1f} MB are still to be written, {free / 1e6:,.1f} MB are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {told}", str(folder))
    return needed, free


def _partial(path: Path) -> Path:
    """A hidden name beside ``path`` for this process alone; what killed processes left under such names is removed."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        owner = left.name.split(".")[-2]
        if owner == str(os.getpid()) or not (owner.isdigit() and _is_alive(int(owner))):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as UTF-8 JSON with sorted keys and a trailing newline, atomically.

    Equal values give equal bytes. Raises ValueError for NaN or infinite numbers, TypeError for values that JSON lacks.
    """
    text = json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


def read_json_object(path: Path) -> dict:
    """A JSON file's object. Raises ValueError if the file is missing or is not exactly that (`parse_json_object`)."""
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    return parse_json_object(Path(path).read_bytes(), str(path))


def parse_json_object(text: bytes, where: str) -> dict:
    """The object that UTF-8 JSON text holds; ``where`` names the text in errors.

    Raises ValueError for a Git LFS pointer, for text that is not valid JSON, repeats a key, or holds no object.
    """
    if text.startswith(LFS_POINTER):
        raise ValueError(f"{where}: this is a Git LFS pointer, not the file; run git lfs pull")
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # undecodable, malformed, over-long numbers, too deeply nested
        raise ValueError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not a JSON object")
    return value


def stored_metadata(path: Path) -> dict:
    """The metadata value that `streaming.save_tensors` left in a file, read without torch; {} where there is none."""
    try:
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return json.loads(header["__metadata__"]["otf"])
    except (OSError, ValueError, KeyError, OverflowError, MemoryError):
        return {}


def _unique(pairs: list[tuple[str, object]]) -> dict:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key} is there twice")
        found[key] = value
    return found


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes as 64 lower-case hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn a full disk's error, which names a partial file or nothing, into one that names ``path``."""
    try:
        yield
    except Exception as error:
        code = _error_number(error)
        if code not in DISK_FULL_ERRORS:
            raise
        raise OSError(code, f"{os.strerror(code)} while writing", str(path)) from error


def _error_number(error: Exception) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    told = re.search(r"\(os error (\d+)\)", str(error))  # how safetensors and tokenizers pass on the system's error
    return int(told[1]) if told else None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
