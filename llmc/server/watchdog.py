"""Ends a process that was asked to stop, in time, even if a graph hangs."""

from __future__ import annotations

import multiprocessing
import os
import queue
import sys
import threading
import time
from typing import NoReturn

GRACE_S = 10.0
"""Extra seconds for cancelled requests, slow clients and closing."""
HURRY_S = 2.0
"""Seconds after a second signal."""


class Watchdog:
    """Ends the process `timeout_s` + GRACE_S seconds after the first signal, HURRY_S after the second, at once at the
    third.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()  # SimpleQueue.put is safe in a signal handler
        self._thread = threading.Thread(target=self._watch, name="llmc-watchdog", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def signalled(self, signum: int) -> None:
        """Record a signal; callable from a signal handler."""
        self._signals.put(signum)

    def dismiss(self) -> None:
        """Stop watching: the process stopped normally."""
        self._signals.put(0)

    def _watch(self) -> None:
        allowed = (self._timeout_s + GRACE_S, HURRY_S, 0.0)
        signum, deadline = self._signals.get(), 0.0
        for seconds in allowed:
            if not signum:
                return
            code = 128 + signum
            now = time.monotonic()
            deadline = min(deadline or now + seconds, now + seconds)
            try:
                signum = self._signals.get(timeout=max(0.0, deadline - now))
            except queue.Empty:
                break
        os.write(2, b"llmc: the server did not stop in time and was ended; requests were cut\n")
        end(code)


def end(code: int) -> NoReturn:
    """Exit now, whatever other threads do, and kill child processes."""
    for child in multiprocessing.active_children():
        child.kill()
        child.join(HURRY_S)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
