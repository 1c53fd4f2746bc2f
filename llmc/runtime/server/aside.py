"""Long work of requests in threads of its own, so that the event loop and the streams on it go on meanwhile.

Two lanes, so that what takes milliseconds does not wait for what takes a second; each is short and bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from llmc.errors import OverloadedError
from llmc.runtime.server.disconnect import unless_disconnected

T = TypeVar("T")

SMALL = 2048
"""Bytes or characters below which work is done at once (about 1 ms)."""
LARGE = 64 << 10
"""… from which it goes into the lane of long work."""
LANE_THREADS = 2
MAX_WAITING = 64
"""Pieces of work that may be in a lane; with more, requests are refused as overload."""


class Lane:
    """A few threads, and what waits for them."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(LANE_THREADS, f"llmc-{name}")
        self._waiting = 0

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`. Cancelled, what has not begun never does. Raises OverloadedError for a full lane."""
        if self._waiting >= MAX_WAITING:
            raise OverloadedError(f"{self._waiting} long requests are being read; try again later", 1.0)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._waiting -= 1


_quick, _long = Lane("quick"), Lane("long")


async def aside(request: Request, size: int, work: Callable[[], T]) -> T:
    """The result of `work` on `size` bytes or characters; what is long is given up when the client leaves.

    Raises what `work` raises, OverloadedError, and ClientDisconnect. The request's body must have been read.
    """
    if size < SMALL:
        return work()
    if size < LARGE:
        return await _quick.run(work)
    return await unless_disconnected(request.receive, _long.run(work))
