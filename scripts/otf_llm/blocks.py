"""Row blocks of tensors of any size, and the threads that work on them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

BLOCK_ELEMENTS = 1 << 18  # weights that a thread holds at a time: few enough for the caches, enough to fill a call

Task = TypeVar("Task")
Result = TypeVar("Result")


def row_blocks(shape: tuple[int, ...], num_elements: int = BLOCK_ELEMENTS) -> Iterator[tuple[int, int]]:
    """(start, stop) of row blocks of a [N, ...] tensor with at most ``num_elements`` elements, one row at least."""
    rows = max(1, num_elements // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield start, min(start + rows, shape[0])


def in_order(function: Callable[[Task], Result], tasks: Iterable[Task], workers: int) -> Iterator[tuple[Task, Result]]:
    """(task, function(task)) for every task, computed on ``workers`` threads and given in the order of the tasks.

    Threads, since torch lets go of the interpreter while it computes. At most 2 * workers + 1 tasks are under way or
    done and not yet given, so that memory stays bounded. The first error ends it: tasks that wait are dropped.
    """
    waiting: deque[tuple[Task, Future]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for task in tasks:
                waiting.append((task, pool.submit(function, task)))
                if len(waiting) > 2 * workers:
                    done, future = waiting.popleft()
                    yield done, future.result()
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
        finally:
            for _, future in waiting:
                future.cancel()
