"""Steps of several engines in one process, one at a time: side by side on the same CPUs each would take far longer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 1.0
"""After so long a step runs beside the other, which may hang."""


class Turns:
    """Who comes first goes first, so that two engines that always have work take turns."""

    def __init__(self) -> None:
        self._next, self._one = threading.Lock(), threading.Lock()

    @contextmanager
    def one(self) -> Iterator[None]:
        """For one step; waits PATIENCE_S at most."""
        has = False
        if self._next.acquire(timeout=PATIENCE_S):
            try:
                has = self._one.acquire(timeout=PATIENCE_S)
            finally:
                self._next.release()
        try:
            yield
        finally:
            if has:
                self._one.release()
