"""What every stage script runs inside: a log file, a thread count, and errors told in one line."""

from __future__ import annotations

import ctypes
import logging
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KIBIBYTE = 1024  # Linux counts memory in these
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt's names for what it sets
KEPT_BYTES = 32 << 20  # the largest mmap threshold that glibc takes


@contextmanager
def stage(log: str, threads: int | None = None) -> Iterator[None]:
    """Log to ``log`` and stderr; a ValueError or OSError becomes "error: <its message>" and exit status 1.

    The log keeps the traceback. Any other exception is a fault of this library and passes through whole.
    ``threads`` sets torch's thread count where torch is in use.
    """
    shown = logging.StreamHandler(sys.stderr)
    shown.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    written = logging.FileHandler(log, mode="w", encoding="utf-8")
    written.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[shown, written], force=True)
    for noisy in ("httpx", "httpcore", "urllib3", "filelock", "fsspec", "matplotlib", "datasets"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if threads is not None and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    _keep_freed_memory()
    try:
        yield
        logging.getLogger(__name__).info("peak resident memory %.1f MB", peak_memory() / 1e6)
    except (ValueError, OSError) as error:
        shown.setLevel(logging.CRITICAL)  # the file takes the traceback, the person one line
        logging.getLogger(__name__).exception("the stage failed")
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        sys.exit(1)


def peak_memory() -> int:
    """Bytes of this process's peak resident memory, exact where Snakemake's benchmark looks only now and then.

    From Linux's VmHWM: ru_maxrss, taken elsewhere, also counts what the parent held when it started this process.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * KIBIBYTE
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE


def _keep_freed_memory() -> None:
    """Let glibc reuse freed buffers of some MB; by default it returns them, and page faults cost more than the work."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def pick_device(setting: str) -> str:
    """``cpu`` or ``cuda``; ``auto`` takes the GPU where there is one. Raises ValueError for cuda without one."""
    import torch

    if setting == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for, but torch sees no CUDA device")
    return ("cuda" if torch.cuda.is_available() else "cpu") if setting == "auto" else setting


def provenance(repository: Path) -> dict:
    """Commit of the code (``unknown`` outside a git checkout, ``+changes`` on a modified one) and library versions."""
    from importlib.metadata import PackageNotFoundError, version

    import otf_llm

    versions = {"otf_llm": otf_llm.__version__}
    for package in ("torch", "transformers", "triton"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    return {"commit": _commit(repository), "versions": versions}


def _commit(repository: Path) -> str:
    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "HEAD")
    if head is None:
        return "unknown"
    return head + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
