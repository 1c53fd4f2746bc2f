"""Run background work next to requests: with pauses, and at low priority if that can be undone."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

REST = 3.0
"""Seconds of pause for each second of work, while requests run."""
LONGEST_REST_S = 10.0
LOWER = 10
"""Added niceness: leaves the work a tenth of a contended core. At 19 more, a swap under full load took minutes."""
NICEST = 19
"""The system's maximum; higher values are clamped to it."""
_LOOK_S = 0.05


class Pace:
    """Pauses between parts of the work, REST times as long as the last part, while `busy` returns true."""

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy, self._since = busy, time.monotonic()

    def rest(self) -> None:
        """Pause the working thread, LONGEST_REST_S at most."""
        now = time.monotonic()
        until = now + min(LONGEST_REST_S, REST * (now - self._since))
        while self._busy() and (left := until - time.monotonic()) > 0:
            time.sleep(min(_LOOK_S, left))
        self._since = time.monotonic()


@contextmanager
def low_priority() -> Iterator[None]:
    """Raise the niceness of the calling thread by LOWER, so that serving goes first. The thread must end afterwards.

    Threads and child processes that it starts inherit this and live on, so they are reset at the end. Does nothing if
    the system does not allow a reset (RLIMIT_NICE, CAP_SYS_NICE), or if niceness is not per thread.
    """
    if not (sys.platform == "linux" and _may_return()):
        yield
        return
    me = threading.get_native_id()
    usual, before = os.getpriority(os.PRIO_PROCESS, me), _tasks()
    low = min(usual + LOWER, NICEST)
    os.setpriority(os.PRIO_PROCESS, me, low)
    try:
        yield
    finally:
        for task in _tasks() - before:
            with suppress(OSError):  # it has ended
                if (has := os.getpriority(os.PRIO_PROCESS, task)) >= low:
                    os.setpriority(os.PRIO_PROCESS, task, has - (low - usual))


def _tasks() -> set[int]:
    """Return the threads of this process and of its children."""
    found = list(Path("/proc/self/task").iterdir())
    for task in list(found):
        with suppress(OSError):
            for child in (task / "children").read_text().split():
                found += Path(f"/proc/{child}/task").iterdir()
    return {int(task.name) for task in found}


def _may_return() -> bool:
    """Try whether the calling thread may lower its niceness again."""
    me = threading.get_native_id()
    own = os.getpriority(os.PRIO_PROCESS, me)
    try:
        os.setpriority(os.PRIO_PROCESS, me, own + 1)
        os.setpriority(os.PRIO_PROCESS, me, own)
    except OSError:
        return False
    return True
