"""Wake the main thread on signals, whatever it waits for."""

from __future__ import annotations

import signal
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def nothing(signum: int, frame: Any) -> None:
    """Handle a signal that is read from the bell."""


@contextmanager
def bell(signals: Iterable[int]) -> Iterator[socket.socket]:
    """Open a socket that receives the number of each handled signal as a byte; `signals` get the handler `nothing`.

    The C-level handler writes the byte. A thread that waits for a lock instead would miss a signal that arrives as the
    wait begins, until the next one. For the main thread.
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
