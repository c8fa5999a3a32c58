"""This process's memory: its peak, and what the C library does with buffers that were freed.

The allocator's part is glibc's; with another C library it does nothing.
"""

from __future__ import annotations

import ctypes
import re
import resource
from pathlib import Path

KIBIBYTE = 1024  # Linux counts memory in these
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt's names for what it sets
KEPT_BYTES = 32 << 20  # the largest mmap threshold that glibc takes


def peak_memory() -> int:
    """Bytes of this process's peak resident memory, exact where Snakemake's benchmark looks only now and then.

    From Linux's VmHWM: ru_maxrss, taken elsewhere, also counts what the parent held when it started this process.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * KIBIBYTE
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE


def keep_freed_memory() -> None:
    """Let freed buffers of some MB be used again at once; page faults for new ones cost more than the work in them."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def return_freed_memory() -> None:
    """Give freed memory back: a layer's weights leave holes that the next layer's do not fit into."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
