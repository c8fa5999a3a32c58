"""Lets a killed run be started again by the same command.

Snakemake marks its working directory with lock files, and the outputs of running jobs as incomplete; after a kill it
refuses to start until it is told what to do with both. Here a run holds an operating-system lock too, which ends with
its process however that dies: whoever gets it knows that marks found are left over, and can clear them.
"""

from __future__ import annotations

import base64
import fcntl
import logging
import shutil
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)


def claim_directory(directory: Path) -> IO | None:
    """Claim a Snakemake working directory and clear what a dead run left in it: its locks, and its unfinished outputs.

    Returns:
        The open lock file, to be kept open while the run lasts, or None where another run holds the directory (its
        own locks then stand, and Snakemake reports them).
    """
    directory = Path(directory)
    state = directory / ".snakemake"
    state.mkdir(exist_ok=True)
    claim = open(state / "claim", "w")
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        claim.close()
        return None
    for lock in sorted((state / "locks").glob("*.lock")):
        lock.unlink()
    markers = state / "incomplete"
    for marker in sorted(path for path in markers.rglob("*") if path.is_file()):
        _remove_output(directory, _marked_output(marker.relative_to(markers)))
        marker.unlink()
    return claim


def _marked_output(marker: Path) -> str:
    """The output that a marker stands for: URL-safe base64 in path components, all but the last marked with an @."""
    return base64.urlsafe_b64decode("".join(part.removeprefix("@") for part in marker.parts)).decode()


def _remove_output(directory: Path, name: str) -> None:
    path = directory / name
    if not path.resolve().is_relative_to((directory / "results").resolve()) or not path.exists():
        return
    logger.warning("a killed run left %s unfinished; it is made again", name)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
