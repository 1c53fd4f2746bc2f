"""Running a workload against a server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, TypeVar

from llmc.bench.loadtest.client import Caller, Endpoint, Prompt, message_of, reason_of
from llmc.bench.loadtest.http import Site
from llmc.bench.loadtest.outcome import Failure, Outcome
from llmc.bench.loadtest.prompts import WORDS, Calibration, Prompts, text
from llmc.bench.loadtest.report import Report, make_report
from llmc.bench.loadtest.workload import Ask, Workload
from llmc.errors import InputError, LlmcError

FEW, MANY = 1, 64
"""Words of the two texts that calibrate; the longer is halved while the server finds it too long."""


async def find_model(caller: Caller) -> Caller:
    """`caller` with a model: its own, or the only or first one that the server lists.

    Raises LlmcError when the server cannot be reached or is not ready, InputError when it wants another key or lists
    no model.
    """
    status, answer = await _ask(caller, "GET", "/v1/models")
    _refuse(caller, status, answer)
    if caller.model:
        return caller
    listed = answer.get("data") if status == 200 and isinstance(answer, dict) else None
    names = [m["id"] for m in listed or () if isinstance(m, dict) and isinstance(m.get("id"), str)]
    if not names:
        raise InputError(
            f"{caller.site.url}/v1/models lists no model ({status}); check the URL, or name one with --model"
        )
    return replace(caller, model=names[0])


async def calibrate(caller: Caller, longest: int) -> Calibration | None:
    """How the server counts the words of `prompts`, from two answers of a token; None: it does not say.

    `longest` is the longest prompt to come, in tokens. These two are sent like the run's requests. So an error that
    every request would meet is raised here, as LlmcError or InputError with the server's answer.
    """
    draw = random.Random("calibration")  # noqa: S311 - a workload, not a secret
    few = await _counted(caller, text(FEW, draw))
    if few is None:
        return None
    words = max(2, min(MANY, longest))
    while True:
        try:
            many = await _counted(caller, text(words, draw))
            break
        except InputError:
            if words == FEW + 1:
                raise
            words = max(FEW + 1, words // 2)
    return None if many is None else Calibration.fit((FEW, few), (words, many))


async def vocabulary(caller: Caller) -> list[int]:
    """Token ids of common words, by the server's own tokenizer. Raises InputError where it has no /tokenize."""
    words = " " + " ".join(dict.fromkeys(WORDS))
    for path, content in (
        ("/tokenize", {"model": caller.model, "prompt": words, "add_special_tokens": False}),
        ("/extras/tokenize", {"input": words}),
    ):
        status, answer = await _ask(caller, "POST", path, content)
        ids = answer.get("tokens") if status == 200 and isinstance(answer, dict) else None
        if isinstance(ids, list) and ids and all(type(i) is int for i in ids):
            return list(dict.fromkeys(ids))
    raise InputError(f"{caller.site.url} has no /tokenize to make --prompt-ids with; leave the flag out")


async def _ask(caller: Caller, method: str, path: str, content: dict[str, Any] | None = None) -> tuple[int, Any]:
    try:
        return await caller.ask(method, path, content)
    except OSError as error:
        raise _unreachable(caller.site, reason_of(error)) from None


async def _counted(caller: Caller, prompt: str) -> int | None:
    """Prompt tokens of a request for one token."""
    outcome = await caller.call(Outcome(0, 0.0, 1, 1), prompt, perf_counter())
    if outcome.failure is not None:
        raise _explained(caller, outcome.failure)
    return outcome.prompt_tokens


def _refuse(caller: Caller, status: int, answer: Any) -> None:
    if status in (401, 403, 429, 503):
        raise _explained(caller, Failure(f"http {status}", message_of(answer, b"")))


def _explained(caller: Caller, failure: Failure) -> LlmcError:
    """The error for a first request that failed: what the server said, and what to do."""
    where, said = caller.site.url, f": {failure.message}" if failure.message else ""
    if failure.kind == "no connection":
        return _unreachable(caller.site, failure.message)
    if failure.kind in ("http 401", "http 403"):
        given = "takes another API key than the one given" if caller.api_key else "wants an API key; give --api-key"
        return InputError(f"{where} {given} ({failure.kind[5:]}){said}")
    if failure.kind == "http 404":
        return InputError(f"{where} has no model {caller.model!r}, or no {caller.endpoint} endpoint (404){said}")
    if failure.refused:
        return LlmcError(f"{where} takes no requests now ({failure.kind[5:]}){said}; try again when it is ready")
    if failure.kind.startswith("http 4"):
        return InputError(f"{where} refuses the kind of request that is to be sent ({failure.kind[5:]}){said}")
    return LlmcError(f"{where} does not answer as a streaming server: {failure.kind}{said}")


def _unreachable(site: Site, reason: str) -> LlmcError:
    return LlmcError(f"{site.url} cannot be reached: {reason}; is the server running there?")


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
