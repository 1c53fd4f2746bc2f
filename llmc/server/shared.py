"""Run work once for all concurrent callers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class SharedWork:
    """Results of work in a thread, shared by all who called before it began."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._begun = 0
        self._result: Any = None

    async def get(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, begun after this call. Errors of `work` are raised in one of the callers."""
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
