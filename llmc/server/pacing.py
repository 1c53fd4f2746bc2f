"""Work beside requests that run: with rests, and at a low priority where it can be taken back."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

REST = 3.0
"""Seconds of rest for each second of work, while requests run."""
LONGEST_REST_S = 10.0
LOWER = 10
"""Of niceness: a tenth of a core that others want. At 19 more a swap under full load took minutes."""
NICEST = 19
"""The system takes no higher niceness, and sets this one instead."""
_LOOK_S = 0.05


class Pace:
    """`rest` waits between two parts of the work, REST times as long as the last part took, while `busy` says so."""

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy, self._since = busy, time.monotonic()

    def rest(self) -> None:
        """In the thread that works; LONGEST_REST_S at most."""
        now = time.monotonic()
        until = now + min(LONGEST_REST_S, REST * (now - self._since))
        while self._busy() and (left := until - time.monotonic()) > 0:
            time.sleep(min(_LOOK_S, left))
        self._since = time.monotonic()


@contextmanager
def low_priority() -> Iterator[None]:
    """The calling thread, which is to end behind it, is nicer by LOWER: what serves meanwhile goes first.

    Threads and child processes that it starts have that too, and go on serving, so they get the usual one back in the
    end. Where the system allows this to nobody (RLIMIT_NICE, CAP_SYS_NICE), or niceness is not a thread's own, nothing
    changes.
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
    """The threads of this process and of its children."""
    found = list(Path("/proc/self/task").iterdir())
    for task in list(found):
        with suppress(OSError):
            for child in (task / "children").read_text().split():
                found += Path(f"/proc/{child}/task").iterdir()
    return {int(task.name) for task in found}


def _may_return() -> bool:
    """Whether the calling thread may be less nice again; it is tried."""
    me = threading.get_native_id()
    own = os.getpriority(os.PRIO_PROCESS, me)
    try:
        os.setpriority(os.PRIO_PROCESS, me, own + 1)
        os.setpriority(os.PRIO_PROCESS, me, own)
    except OSError:
        return False
    return True
