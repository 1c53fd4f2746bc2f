"""The engine in its own thread, for asyncio: requests in, updates out.

A second thread reports each step's tokens (texts, stop strings, observers, streams) while the next step runs. A stop
string is therefore detected one step late, and that step's extra token is discarded.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from llmc.errors import EngineDeadError, InputError, OverloadedError
from llmc.runtime.engine.engine import LONG_WORK, work_of

if TYPE_CHECKING:
    from llmc.runtime.engine.core import StepOutput
    from llmc.runtime.engine.engine import LLMEngine, Prepared
    from llmc.runtime.engine.observer import EngineStats
    from llmc.runtime.engine.requests import Request, Update

_log = logging.getLogger("llmc")

LONGEST_RETRY_S = 60.0
CANCEL_GRACE_S = 5.0
"""Seconds that a drain waits for cancelled requests to end, which takes the rest of the running step."""
_SMOOTHING = 0.1
_CLOSING = "the server is shutting down; send the request to another one"
_OVER = object()


class Stream:
    """The updates of one request, in order. It ends after the last choice's last update.

    Raises EngineDeadError if the engine stops on an error. `cancel` may be called repeatedly and also after the end;
    the slot is free before the next step.
    """

    def __init__(self, engine: AsyncEngine, request: Request, choices: int) -> None:
        self.request = request
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[list[Update] | None] = asyncio.Queue()
        self._open = choices
        self.began_s = time.perf_counter()
        self._over = False

    async def __aiter__(self) -> AsyncIterator[list[Update]]:
        while self._open:
            updates = await self._news.get()
            if updates is None:
                raise self._engine.death()
            self._open -= sum(u.finish_reason is not None for u in updates)
            yield updates

    def cancel(self) -> None:
        """Cancel the request."""
        if not self._over:
            self._engine.cancel(self.request.request_id)

    def put(self, updates: list[Update] | None) -> None:
        """Deliver updates from the engine's thread, or None if the engine died."""
        try:
            self._loop.call_soon_threadsafe(self._news.put_nowait, updates)
        except RuntimeError:  # the loop was closed: nobody reads any more
            self._over = True

    def end(self) -> None:
        """Mark the end of the updates."""
        self._over = True


class Reporter:
    """A thread that runs jobs in order. At most one job runs and none is queued. Jobs must not raise.

    Unlike threads of concurrent.futures, it does not delay the interpreter's exit. `put` and `settle` must not be
    called concurrently.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._idle = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], object]) -> None:
        """Wait for the previous job, then start `job`."""
        self._idle.acquire()
        self._jobs.put(job)

    def settle(self) -> None:
        """Wait until all jobs are done."""
        with self._idle:
            pass

    def close(self) -> None:
        """End the thread after all jobs."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            finally:
                self._idle.release()


class AsyncEngine:
    """Runs `engine` in a thread. `max_queued_requests` limits the sequences waiting for a slot (None: no limit).

    A request is rejected while the unfinished sequences fill all slots and the queue. Call `submit`, `open` and `drain`
    in a running event loop, other methods anywhere. `on_close` is called when the thread has ended.
    """

    def __init__(
        self, engine: LLMEngine, max_queued_requests: int | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.engine = engine
        slots = engine.core.max_num_seqs
        self._bound = math.inf if max_queued_requests is None else slots + max_queued_requests
        self._slots = slots
        self._on_close = on_close
        self._between: Iterator[object] | None = None
        self._commands: deque[Callable[[], object]] = deque()
        self._wake = threading.Condition()
        self._streams: dict[str, tuple[Stream, int]] = {}
        self._in_flight = 0
        self._preparing = 0
        self._cutting = False
        self._seconds = 0.0
        self._closing = False
        self._error: BaseException | None = None
        self._reporter = Reporter("llmc-reporter")
        self._stats = engine.stats
        self.draining = False
        if engine.core.prefiller is not None:
            engine.core.prefiller.on_news(self._prefill_news)
        self._thread = threading.Thread(target=self._run, name="llmc-engine", daemon=True)
        self._thread.start()

    async def open(self, request: Request) -> Stream:
        """Submit a request without blocking the event loop while its grammar compiles.

        Meanwhile the request counts as waiting. Cancelling this coroutine cancels it. Raises what `submit` raises.
        """
        if request.params.structured_outputs is None and work_of(request) < LONG_WORK:
            return self.submit(request)
        self.check_room()
        choices = request.params.choices
        with self._wake:
            self._preparing += 1
            self._in_flight += choices
        try:
            prepared = await self.engine.aprepare(request)
        finally:
            with self._wake:
                self._preparing -= 1
                self._in_flight -= choices
        return self._queue(prepared)

    def submit(self, request: Request) -> Stream:
        """Queue a request.

        Raises at once: InputError (it cannot run), OverloadedError (queue full or draining, with retry_after_s), or
        EngineDeadError.
        """
        self.check_room()
        return self._queue(self.engine.prepare(request))

    def _check_alive(self) -> None:
        if self._error is not None:
            raise self.death()
        if self._closing:
            raise EngineDeadError("the engine is closed")

    def check_room(self) -> None:
        """Raise OverloadedError or EngineDeadError if `submit` would raise it for any request now."""
        self._check_alive()
        if self.draining:
            raise OverloadedError(_CLOSING, LONGEST_RETRY_S)
        if self._in_flight >= self._bound:
            raise OverloadedError(
                f"the queue is full: {self._in_flight} sequences run or wait; try again later", self._retry_after()
            )

    def _retry_after(self) -> float:
        """Estimated seconds until the queue has room: one request's duration divided by the number of slots."""
        return min(LONGEST_RETRY_S, max(1.0, self._seconds / self._slots))

    def _queue(self, prepared: Prepared) -> Stream:
        choices = len(prepared.samplers)
        request = prepared.request
        stream = Stream(self, request, min(request.params.n, choices))
        with self._wake:
            self._check_alive()
            if self._cutting:
                raise OverloadedError(_CLOSING, LONGEST_RETRY_S)
            if request.request_id in self._streams:
                raise InputError(f"a request with id {request.request_id!r} runs already; ids must differ")
            self._streams[request.request_id] = (stream, choices)
            self._in_flight += choices
            self._commands.append(lambda: self.engine.add(prepared))
            self._wake.notify()
        return stream

    def cancel(self, request_id: str) -> None:
        """Cancel a request, if it still runs."""
        with self._wake:
            self._commands.append(lambda: self._cancel(request_id))
            self._wake.notify()

    @property
    def stats(self) -> EngineStats:
        """Gauges after the last step. Requests whose grammar compiles count as waiting."""
        return replace(self._stats, waiting=self._stats.waiting + self._preparing) if self._preparing else self._stats

    @property
    def in_flight(self) -> int:
        """Number of sequences that run or wait."""
        return self._in_flight

    @property
    def error(self) -> BaseException | None:
        """The error that stopped the engine, or None."""
        return self._error

    def death(self) -> EngineDeadError:
        """The error that callers get after the engine died. The cause is in the log, not in this error."""
        kind = type(self._error).__name__
        return EngineDeadError(f"the engine stopped on an error ({kind}); see the server's log, and start it again")

    async def drain(self, timeout_s: float) -> int:
        """Reject new requests, wait up to `timeout_s` for accepted ones, cancel the rest and return their number."""
        self.draining = True
        await self._idle(timeout_s)
        self._cutting = True
        rest = list(self._streams)
        for request_id in rest:
            self.cancel(request_id)
        await self._idle(CANCEL_GRACE_S)
        return len(rest)

    async def _idle(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while (self._streams or (self._preparing and not self._cutting)) and self._error is None and loop.time() < end:
            await asyncio.sleep(min(0.02, max(0.0, end - loop.time())))

    def work_between(self, work: Iterator[object]) -> None:
        """Run `work` while there are no requests.

        Its items are produced in the engine's thread, one at a time, and may run steps in any slot. A new request waits
        for the current item. The iterator must not raise.
        """
        with self._wake:
            self._between = work
            self._wake.notify()

    def close(self, timeout_s: float | None = None) -> bool:
        """Stop the thread after its current step; returns whether it stopped within `timeout_s`."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._next():
                outcome = None if self.engine.core.waits else self.engine.run()
                if outcome is None:
                    self._reporter.settle()
                    self._stats = self.engine.stats
                else:
                    ended_s, gauges = time.perf_counter(), self.engine.core.stats
                    self._reporter.put(partial(self._report, outcome, ended_s, gauges))
        except BaseException as e:  # noqa: BLE001 - whatever it is, requests must hear of it
            self._stop_on(e)
        self._reporter.close()
        with self._wake:
            streams, self._streams = list(self._streams.values()), {}
            self._in_flight -= sum(choices for _, choices in streams)
        for stream, _ in streams:
            stream.put(None)
            stream.end()
        self.engine.close()
        if self._on_close is not None:
            self._on_close()

    def _report(self, outcome: StepOutput, ended_s: float, gauges: EngineStats) -> None:
        try:
            updates = self.engine.report(outcome, ended_s)
            self._stats = self.engine.stats_with(gauges)
            self._deliver(updates)
        except BaseException as e:  # noqa: BLE001 - whatever it is, requests must hear of it
            self._stop_on(e)

    def _cancel(self, request_id: str) -> None:
        self._reporter.settle()  # no report may follow a request's end
        updates = self.engine.cancel(request_id)
        self._stats = self.engine.stats
        self._deliver(updates)

    def _stop_on(self, error: BaseException) -> None:
        _log.error("the engine stopped on an error: %s: %s", type(error).__name__, error, exc_info=error)
        with self._wake:
            self._error = self._error or error
            self._closing = True
            self._wake.notify()

    def _next(self) -> bool:
        """Apply what callers requested since the last step; false if the thread must end."""
        with self._wake:
            while not (self._commands or self._closing or self._can_work):
                self._wake.wait()
            if self._closing:
                return False
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command()
        if self._between is not None and not self.engine.has_work:
            self.engine.settle()
            self._work_between(self._between)
        return True

    @property
    def _can_work(self) -> bool:
        if self.engine.core.has_work:
            return not self.engine.core.waits
        return self._between is not None and not self.engine.has_work

    def _prefill_news(self) -> None:
        with self._wake:
            self._wake.notify()

    def _work_between(self, work: Iterator[object]) -> None:
        """Produce one item, and forget what slots held before."""
        if next(work, _OVER) is _OVER:
            self._between = None
        self.engine.core.forget_slots()

    def _deliver(self, updates: list[Update]) -> None:
        """Send updates, after `_stats` no longer counts the requests that end with them."""
        grouped: dict[str, list[Update]] = {}
        for update in updates:
            grouped.setdefault(update.request_id, []).append(update)
        for request_id, news in grouped.items():
            entry = self._streams.get(request_id)
            if entry is None:
                continue
            stream, choices = entry
            if not self.engine.runs(request_id):
                with self._wake:  # before the update is sent: a caller that sees the end may submit again at once
                    del self._streams[request_id]
                    self._in_flight -= choices
                stream.end()
                self._seconds += _SMOOTHING * (time.perf_counter() - stream.began_s - self._seconds)
            stream.put(news)
        if self._between is not None and not self.engine.has_work:
            with self._wake:
                self._wake.notify()
