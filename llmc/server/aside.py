"""Run work for a connected client outside the event loop, so that streams continue.

Two lanes of threads, both short and bounded, keep work of milliseconds from waiting for work of a second.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from llmc.errors import OverloadedError
from llmc.runtime.heap import trim

if TYPE_CHECKING:
    from llmc.buckets.plan import Plan


T = TypeVar("T")

SMALL = 2048
"""Bytes or characters below which work runs at once (about 1 ms)."""
LARGE = 64 << 10
"""Bytes or characters from which work goes into the lane of long work."""
LANE_THREADS = 2
"""Threads of the lane of shorter work. The other lane has one, because its work mostly holds the interpreter."""
TRIM_S = 1.0
"""Seconds without long work after which freed memory is returned to the system."""
MAX_WAITING = 64
"""Maximum jobs per lane; further requests are refused as overload."""


class Lane:
    """`threads` and their queue. `trims`: when idle, freed memory goes back to the system."""

    def __init__(self, name: str, threads: int, trims: bool = False) -> None:
        self._pool = ThreadPoolExecutor(threads, f"llmc-{name}")
        self._waiting = 0
        self._trims = trims
        self._quiet: asyncio.TimerHandle | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work`, unless this is cancelled before it begins. Raises OverloadedError for a full lane."""
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
    """Return the result of `work` on `size` bytes or characters; long work is dropped when the client disconnects.

    Read the request's body before. Raises errors of `work`, OverloadedError, and ClientDisconnect.
    """
    if size < SMALL:
        return work()
    if size < LARGE:
        return await _quick.run(work)
    return await unless_disconnected(request.receive, _long.run(work))


async def disconnected(receive: Receive) -> None:
    """Return when the client disconnects. Read the request's body before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; raises ClientDisconnect if the client leaves first.

    On disconnect or cancellation, `work` is cancelled and has ended when this returns.
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


TIMEOUT_S = 120.0
NICE = 10
_MODULE = "llmc.buckets.planner.replanning"


class Replanner:
    """Runs one process at a time; concurrent callers share its result."""

    def __init__(self) -> None:
        self._running: asyncio.Task[dict[str, Any]] | None = None

    async def offer(self, plan: Plan, metrics: str) -> dict[str, Any]:
        """Return {"offer": Offer.to_dict() or None} or {"error": reason}."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(_offered(plan, metrics))
        return await asyncio.shield(self._running)


async def _offered(plan: Plan, metrics: str) -> dict[str, Any]:
    child = await asyncio.create_subprocess_exec(
        "nice", "-n", str(NICE), sys.executable, "-m", _MODULE, stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reported, _ = await child.communicate(json.dumps({"plan": plan.to_dict(), "metrics": metrics}).encode())
    except TimeoutError:
        return {"error": f"planning took more than {TIMEOUT_S:.0f} s; use llmc plan --traffic"}
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode:
        return {"error": f"planning ended with {child.returncode}"}
    found: dict[str, Any] = json.loads(reported)
    return found
