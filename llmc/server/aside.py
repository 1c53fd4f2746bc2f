"""Work for a client only while the client is there, and long work in threads of its own, so that the event loop and the
streams on it go on meanwhile.

There are two lanes, so that work of milliseconds does not wait for work of a second. Each lane is short and bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from llmc.errors import OverloadedError
from llmc.runtime.heap import trim

T = TypeVar("T")

SMALL = 2048
"""Bytes or characters below which work is done at once (about 1 ms)."""
LARGE = 64 << 10
"""… from which it goes into the lane of long work."""
LANE_THREADS = 2
"""Threads of the lane of shorter work. The other lane has one, because its work mostly holds the interpreter."""
TRIM_S = 1.0
"""Seconds of quiet after long work until freed memory is given back."""
MAX_WAITING = 64
"""Pieces of work that may be in a lane; with more, requests are refused as overload."""


class Lane:
    """`threads`, and what waits for them. `trims`: once it is quiet, memory that was freed goes back to the system."""

    def __init__(self, name: str, threads: int, trims: bool = False) -> None:
        self._pool = ThreadPoolExecutor(threads, f"llmc-{name}")
        self._waiting = 0
        self._trims = trims
        self._quiet: asyncio.TimerHandle | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`. If this is cancelled before `work` begins, it never begins. Raises OverloadedError for
        a full lane.
        """
        if self._waiting >= MAX_WAITING:
            raise OverloadedError(f"{self._waiting} long requests are being read; try again later", 1.0)
        self._waiting += 1
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._pool, work)
        finally:
            self._waiting -= 1
            if self._trims:
                if self._quiet is not None:
                    self._quiet.cancel()
                self._quiet = loop.call_later(TRIM_S, self._pool.submit, trim)


_quick, _long = Lane("quick", LANE_THREADS), Lane("long", 1, trims=True)


async def aside(request: Request, size: int, work: Callable[[], T]) -> T:
    """The result of `work` on `size` bytes or characters; long work is given up when the client disconnects.

    Raises what `work` raises, OverloadedError, and ClientDisconnect. The request's body must have been read.
    """
    if size < SMALL:
        return work()
    if size < LARGE:
        return await _quick.run(work)
    return await unless_disconnected(request.receive, _long.run(work))


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; raises ClientDisconnect when the client has left before it.

    The work is cancelled then, as when this is cancelled itself, and has ended when this returns.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
