"""A pooler for asyncio programs: calls wait in a bounded queue, and run in threads, as many as there are streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from llmc.errors import OverloadedError
from llmc.runtime.engine.observer import EngineStats

if TYPE_CHECKING:
    from llmc.runtime.pooling.pooler import Pooler

T = TypeVar("T")
WAITING = 64
"""Calls that wait at most, unless it is said otherwise: a choice."""


class AsyncPooler:
    """Runs calls of `pooler` beside the event loop; more than `most_waiting` that wait are refused.

    It has what a server asks of an engine: `stats`, `error`, `drain`, `close`.
    """

    error: BaseException | None = None

    def __init__(self, pooler: Pooler, most_waiting: int = WAITING) -> None:
        self.pooler = pooler
        self.draining = False
        self._most, self._streams = most_waiting, pooler.encoder.streams
        self._flying = 0
        self._threads = ThreadPoolExecutor(self._streams, thread_name_prefix="llmc-pool")

    @property
    def stats(self) -> EngineStats:
        """Calls that run and that wait; there is no cache."""
        running = min(self._flying, self._streams)
        return EngineStats(running, self._flying - running, self._streams, 0, 0.0, self.pooler.statistics.steps, 0)

    async def run(self, work: Callable[[Pooler], T]) -> T:
        """The result of `work`. Raises what it raises, and OverloadedError where too many wait or the server drains."""
        if self.draining:
            raise OverloadedError("the server is shutting down; send the request to another one")
        if self._flying >= self._streams + self._most:
            raise OverloadedError(f"{self._most} requests wait already; try again later")
        self._flying += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(self.pooler))
        finally:
            self._flying -= 1

    async def drain(self, timeout_s: float) -> int:
        """Take no more calls and wait for the others, `timeout_s` at most; returns how many still run."""
        self.draining = True
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while self._flying and loop.time() < end:
            await asyncio.sleep(min(0.02, max(0.0, end - loop.time())))
        return self._flying

    def close(self, timeout_s: float | None = None) -> bool:
        """Release the pooler once running calls ended; returns that it did."""
        del timeout_s
        self._threads.shutdown(cancel_futures=True)
        self.pooler.close()
        return True
