"""Times of kernels on a GPU: cold weights, CUDA graphs, medians."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Sequence

import torch

LEAST_LAUNCHES = 24  # in a graph, whose own start takes about ten microseconds, or as many as take
LEAST_SECONDS = 3e-3  # when they are launched one by one
COLD_BYTES = 300 << 20  # of weights that a graph goes through: six times the largest L2 cache
WARM_UP = 3


def event_times(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of ``repeats`` runs, each timed by the GPU, after WARM_UP runs more."""
    for _ in range(WARM_UP):
        work()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return times


def launch_times(launches: Sequence[Callable[[], object]], repeats: int) -> tuple[float, float, float]:
    """Tenth percentile, median and ninetieth percentile of one launch's time in microseconds.

    The launches, over again up to LEAST_LAUNCHES or LEAST_SECONDS, are captured in one CUDA graph and replayed
    ``repeats`` times. Give one for every copy of the weights, and enough copies that none is found in the L2 cache
    (``num_copies``).
    """
    for launch in launches[:WARM_UP]:  # compiles, which a capture must not
        launch()
    alone = event_times(launches[0], 1)[0]
    least = min(LEAST_LAUNCHES, math.ceil(LEAST_SECONDS / alone))
    launches = [*launches] * -(-least // len(launches))
    graph = _capture(launches)
    times = sorted(time * 1e6 / len(launches) for time in event_times(graph.replay, repeats))
    return times[len(times) // 10], statistics.median(times), times[-1 - len(times) // 10]


def _capture(launches: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """``torch.cuda.graph`` without its garbage collection, which takes longer than a search's measurements do."""
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()
            try:
                for launch in launches:
                    launch()
            finally:
                graph.capture_end()
    finally:
        if collects:
            gc.enable()
    return graph


def num_copies(num_bytes: int) -> int:
    """Copies of ``num_bytes`` of weights that a graph must go through to find all of them cold, three at least."""
    return max(3, -(-COLD_BYTES // num_bytes))
