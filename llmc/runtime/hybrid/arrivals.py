"""The half of a prefiller that hands over: what came, and who is told of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from llmc.runtime.engine.handover import Prefilled, Prefiller, PrefillFailed


class Arrivals(Prefiller):
    """Results in the order in which they came. `changed` belongs to the lock that guards them."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._came: deque[Prefilled | PrefillFailed] = deque()
        self._call: Callable[[], None] | None = None
        self._closed = False

    def take(self, most: int) -> list[Prefilled | PrefillFailed]:
        """See Prefiller."""
        taken: list[Prefilled | PrefillFailed] = []
        with self._changed:
            while self._came and (most or isinstance(self._came[0], PrefillFailed)):
                taken.append(self._came.popleft())
                most -= isinstance(taken[-1], Prefilled)
            if taken:
                self._made_room()
        return taken

    @property
    def has_news(self) -> bool:
        """See Prefiller. Takes no lock, so that whoever is told of news may ask under one of his own."""
        return bool(self._came)

    def wait(self, timeout_s: float | None = None) -> bool:
        """See Prefiller."""
        with self._changed:
            self._changed.wait_for(lambda: self._came or self._closed, timeout_s)
            return bool(self._came)

    def on_news(self, call: Callable[[], None]) -> None:
        """See Prefiller."""
        self._call = call

    def tell(self) -> None:
        """Call whoever wants to know of news, if there is any; not under the lock."""
        if self._call is not None and self._came:
            self._call()

    def _made_room(self) -> None:
        """Some were taken or forgotten; called under the lock."""
        self._changed.notify_all()

    def _forget(self, number: int) -> None:
        """Drop what came of a prompt that nobody wants any more; called under the lock."""
        self._came = deque(one for one in self._came if one.number != number)
        self._made_room()
