"""What every stage script runs inside: a log file, a thread count, and errors told in one line."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from otf_llm.memory import keep_freed_memory, peak_memory


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
    keep_freed_memory()
    try:
        yield
        logging.getLogger(__name__).info("peak resident memory %.1f MB", peak_memory() / 1e6)
    except (ValueError, OSError) as error:
        shown.setLevel(logging.CRITICAL)  # the file takes the traceback, the person one line
        logging.getLogger(__name__).exception("the stage failed")
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        sys.exit(1)


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
