"""Bounds on work that must not grow, held on machines that are busy with other things."""

from __future__ import annotations

import time
from collections.abc import Callable


def least_cpu_seconds(work: Callable[[], object], rounds: int = 5) -> float:
    """The least CPU time of this thread over some rounds: what the work itself takes, not what it waited for."""
    seconds = []
    for _ in range(rounds):
        began = time.thread_time()
        work()
        seconds.append(time.thread_time() - began)
    return min(seconds)
