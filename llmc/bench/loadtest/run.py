"""Running a workload against a server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

from llmc.bench.loadtest.client import Caller, Endpoint, Prompt
from llmc.bench.loadtest.http import Site
from llmc.bench.loadtest.outcome import Outcome
from llmc.bench.loadtest.preflight import calibrate, find_model, vocabulary
from llmc.bench.loadtest.prompts import Prompts
from llmc.bench.loadtest.report import Report, make_report
from llmc.bench.loadtest.workload import Ask, Workload
from llmc.errors import LlmcError

Progress = Callable[[str, int, int], None]
"""Is told what happened, the number of requests that ended, and of all."""

T = TypeVar("T")


@dataclass(frozen=True)
class LoadTest:
    """A workload and whom to send it to.

    `url` is http(s)://host:port, with or without /v1. `model` None: the first that the server lists. `prompt_ids` sends
    prompts as token ids, `shared_prefix` (0 … 1) is the part of each prompt that all share. `warmup` requests of the
    workload are sent before, one after the other, and not counted. `objectives` are seconds by name (see slo.py).
    `timeout_s` is for each request, from its sending to its end. `extra` is merged into every request's body.
    """

    url: str
    workload: Workload
    endpoint: Endpoint = "completions"
    model: str | None = None
    api_key: str | None = None
    temperature: float = 0.0
    ignore_eos: bool = True
    prompt_ids: bool = False
    shared_prefix: float = 0.0
    warmup: int = 1
    timeout_s: float = 600.0
    objectives: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


def run(test: LoadTest, progress: Progress | None = None) -> Report:
    """Run a load test to its end, in an event loop of its own (uvloop's where it is installed).

    Raises InputError for a workload or URL that cannot be used and for what the server refuses of every request,
    LlmcError when it cannot be reached or no request of the run succeeded. SIGINT and SIGTERM end a run early:
    the report is of the requests that had ended, and counts the others; before the first had, it is KeyboardInterrupt.
    """
    asks = test.workload.asks()
    site = Site.parse(test.url)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            return runner.run(_run(test, site, asks, progress or (lambda *_: None)))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


async def _run(test: LoadTest, site: Site, asks: list[Ask], progress: Progress) -> Report:
    with _cancelled_by_signals():
        return await _measured(test, site, asks, progress)


async def _measured(test: LoadTest, site: Site, asks: list[Ask], progress: Progress) -> Report:
    caller = Caller(
        site, test.model or "", test.endpoint, test.api_key, test.temperature, test.ignore_eos, test.timeout_s,
        test.extra,
    )  # fmt: skip
    caller = await find_model(caller)
    calibration = await calibrate(caller, max(ask.prompt for ask in asks))
    ids = await vocabulary(caller) if test.prompt_ids else None
    prompts = Prompts(calibration, ids, test.shared_prefix, test.workload.seed)
    for i in range(test.warmup):
        ask = asks[i % len(asks)]
        outcome = Outcome(i, 0.0, ask.prompt, ask.output)
        await caller.call(outcome, prompts.make(-1 - i, ask.prompt), perf_counter())
    made = [prompts.make(i, ask.prompt) for i, ask in enumerate(asks)]
    with _many_files(len(asks)):
        cpu = time.process_time()
        start = perf_counter()
        ended = _Ended(len(asks), progress)
        try:
            if test.workload.rate is None:
                await _closed(caller, asks, made, test.workload.concurrency, ended)
            else:
                await _open(caller, asks, made, ended)
        except asyncio.CancelledError:
            if not ended.outcomes:
                raise
        outcomes = ended.outcomes
        share = (time.process_time() - cpu) / (perf_counter() - start)
    report = make_report(
        outcomes, url=site.url, model=caller.model, endpoint=caller.endpoint, sent=test.workload.describe(),
        objectives=test.objectives, client_cpu=share, unfinished=len(asks) - len(outcomes),
    )  # fmt: skip
    if not report.ok:
        first = report.errors[0]
        raise LlmcError(
            f"none of {len(outcomes)} requests to {site.url} succeeded; {first.count}: {first.kind}: {first.example}"
        )
    return report


async def _open(caller: Caller, asks: list[Ask], prompts: list[Prompt], ended: _Ended) -> None:
    """Send each request when it is due, whatever became of those before."""
    outcomes = [Outcome(i, ask.due_s or 0.0, ask.prompt, ask.output) for i, ask in enumerate(asks)]
    tasks = []
    async with asyncio.TaskGroup() as group:
        began = perf_counter()
        for outcome, prompt in zip(outcomes, prompts, strict=True):
            left = began + outcome.due_s - perf_counter()
            if left > 0:
                await asyncio.sleep(left)
            tasks.append(group.create_task(ended.after(caller.call(outcome, prompt, began))))


async def _closed(caller: Caller, asks: list[Ask], prompts: list[Prompt], concurrency: int, ended: _Ended) -> None:
    """`concurrency` clients, each of which sends its next request when its last has ended."""
    waiting = iter(enumerate(asks))
    began = perf_counter()

    async def client() -> None:
        for i, ask in waiting:
            outcome = Outcome(i, perf_counter() - began, ask.prompt, ask.output)
            await ended.after(caller.call(outcome, prompts[i], began))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(asks))):
            group.create_task(client())


class _Ended:
    """The requests that have ended, in that order, and the progress of it."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._total, self._progress = total, progress
        self._failed = 0
        self.outcomes: list[Outcome] = []

    async def after(self, call: Coroutine[Any, Any, Outcome]) -> None:
        outcome = await call
        self.outcomes.append(outcome)
        self._failed += not outcome.ok
        self._progress(f"{self._failed} failed" if self._failed else "all well", len(self.outcomes), self._total)


@contextlib.contextmanager
def _cancelled_by_signals() -> Iterator[None]:
    """SIGINT and SIGTERM cancel the current task, in the main thread."""
    task = asyncio.current_task()
    if task is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    for signum in before:
        loop.add_signal_handler(signum, task.cancel)
    try:
        yield
    finally:
        for signum, handler in before.items():
            loop.remove_signal_handler(signum)
            signal.signal(signum, handler)


@contextlib.contextmanager
def _many_files(count: int) -> Iterator[None]:
    """Let this process open a connection for each of `count` requests at once, as far as the system allows."""
    try:
        import resource
    except ImportError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _open_files() + 256
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        yield
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _open_files() -> int:
    """Of this process; a guess where the system does not tell."""
    try:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    except OSError:
        return 256


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
