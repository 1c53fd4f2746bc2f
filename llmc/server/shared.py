"""Work that many ask for at once is done once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class SharedWork:
    """Results of work in a thread, each for all who asked for it before it began."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._begun = 0
        self._result: Any = None

    async def get(self, work: Callable[[], T]) -> T:
        """The result of `work`, begun after this was called. Raises what `work` raises, to one of those who asked."""
        before = self._begun
        async with self._lock:
            if self._begun == before:
                self._begun += 1
                try:
                    self._result = await asyncio.to_thread(work)
                except BaseException:
                    self._begun -= 1
                    raise
            found: T = self._result
            return found
