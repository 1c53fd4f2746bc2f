"""Signals wake the main thread, whatever it waits in."""

from __future__ import annotations

import signal
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def nothing(signum: int, frame: Any) -> None:
    """The handler of a signal that is read from the bell."""


@contextmanager
def bell(signals: Iterable[int]) -> Iterator[socket.socket]:
    """A socket from which the number of each signal with a handler is read, a byte; `signals` get `nothing` for one.

    The C handler writes it. A thread that waits for a lock instead would miss a signal that comes as the wait begins,
    until the next. For the main thread.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        woken = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        before = {signum: signal.signal(signum, nothing) for signum in signals}
        try:
            yield ours
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
            signal.set_wakeup_fd(woken)
