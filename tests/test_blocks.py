"""Row blocks cover a tensor once; threads give results in order, hold few at a time, and stop at the first error."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otf_llm.blocks import in_order, row_blocks


@given(st.lists(st.integers(0, 40), min_size=1, max_size=3), st.integers(1, 300))
def test_blocks_cover_every_row_once_within_the_bound(shape, num_elements):
    blocks = list(row_blocks(tuple(shape), num_elements))
    assert [row for start, stop in blocks for row in range(start, stop)] == list(range(shape[0]))
    width = 1
    for size in shape[1:]:
        width *= size
    assert all((stop - start) * width <= num_elements or stop - start == 1 for start, stop in blocks)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_come_in_the_order_of_the_tasks(workers):
    def slow_first(task):
        time.sleep(0.02 if task % 5 == 0 else 0)
        return task * task

    assert list(in_order(slow_first, range(20), workers)) == [(task, task * task) for task in range(20)]


def test_few_tasks_are_taken_ahead_of_the_results():
    taken = []

    def tasks():
        for task in range(100):
            taken.append(task)
            yield task

    results = in_order(lambda task: task, tasks(), 3)
    for _ in range(10):
        next(results)
    assert len(taken) <= 10 + 2 * 3 + 1
    results.close()


def test_the_first_error_ends_it():
    started = []

    def fail_at_two(task):
        started.append(task)
        if task == 2:
            raise ValueError("two")
        return task

    with pytest.raises(ValueError, match="two"):
        list(in_order(fail_at_two, range(1000), 2))
    assert len(started) < 20


def test_workers_run_at_once():
    barrier = threading.Barrier(3, timeout=10)
    assert [task for task, _ in in_order(lambda _: barrier.wait(), range(3), 3)] == [0, 1, 2]
