"""Bounds on work that must not grow, and waits for events, on machines that are busy with other things."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 30.0
"""How long a test waits for an event. A test that passes waits far less, also on a busy machine."""


def until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Wait for what no event reports; raises AssertionError after `seconds`."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, f"not within {seconds:g} s"
        time.sleep(0.005)


def least_cpu_seconds(work: Callable[[], object], rounds: int = 5) -> float:
    """The least CPU time of this thread over some rounds: what the work itself takes, not what it waited for."""
    seconds = []
    for _ in range(rounds):
        began = time.thread_time()
        work()
        seconds.append(time.thread_time() - began)
    return min(seconds)
