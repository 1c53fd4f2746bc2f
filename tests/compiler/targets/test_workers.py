"""Work on many shapes at once: results in order, the first error, and processes that are killed."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from llmc.compiler.targets.workers import Jobs, Workers
from llmc.errors import CompileError


def test_results_are_in_the_order_of_the_items_and_reported_as_they_come() -> None:
    later, reported = threading.Event(), []

    def work(item: int) -> int:
        assert item or later.wait(30)
        return item * 2

    def on_progress(item: int, result: int) -> None:
        reported.append((item, result))
        later.set()

    with Jobs(2, None) as jobs:
        assert jobs.each(work, [0, 1], on_progress) == [0, 2]
    assert reported == [(1, 2), (0, 0)]


def test_the_first_error_leaves_what_has_not_begun() -> None:
    begun = []

    def work(item: int) -> None:
        begun.append(item)
        raise ValueError(item)

    with Jobs(1, None) as jobs, pytest.raises(ValueError, match=r"^0$"):
        jobs.each(work, range(100))
    assert begun == [0]


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_is_an_error_that_names_what_it_compiled() -> None:
    with Jobs(1, Workers) as jobs:
        assert jobs.apart("a number", int, "5") == 5
        with pytest.raises(CompileError, match="a worker process was killed while two texts was compiled"):
            jobs.apart("two texts", killed)
