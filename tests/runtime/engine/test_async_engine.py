"""The engine for asyncio: streams, the bounded queue, cancellation, draining, death. Over the fake executor."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from llmc.compiler.verification.toy_reference import ToyReference
from llmc.errors import EngineDeadError, InputError, OverloadedError
from llmc.runtime.async_llm import BundleAsyncLLM
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine import engine as llm_engine
from llmc.runtime.engine.async_engine import AsyncEngine, Stream
from llmc.runtime.engine.observer import Observer, RequestSummary, StepRecord
from llmc.runtime.engine.requests import Request, Update
from llmc.runtime.engine.sampling.params import RequestOutputKind, SamplingParams
from llmc.runtime.startup.opening import EngineOptions, open_engine, open_executor
from tests.devices import use, watching
from tests.tiers import default_cases, full
from tests.timing import PATIENCE_S
from tests.toy import Toy


def greedy(max_tokens: int = 4, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **params)


class Gate:
    """Lets the fake device's steps pass, one by one or freely."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._steps = threading.Semaphore(0)
        self._free = threading.Event()
        self.failing: BaseException | None = None
        self.waiting = threading.Event()
        use(monkeypatch, executor=watching(self._pass))

    def _pass(self, step: object) -> None:
        if not self._free.is_set():
            self.waiting.set()
            assert self._steps.acquire(timeout=PATIENCE_S)
        if self.failing is not None:
            raise self.failing

    def step(self, count: int = 1) -> None:
        self.waiting.clear()
        self._steps.release(count)

    def open(self) -> None:
        self._free.set()
        self._steps.release(1000)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


class Watcher(Observer):
    def __init__(self) -> None:
        self.ended: list[RequestSummary] = []

    def finished(self, summary: RequestSummary) -> None:
        self.ended.append(summary)


@asynccontextmanager
async def running(toy: Toy, queue: int | None = None, observer: Observer | None = None) -> AsyncIterator[AsyncEngine]:
    bundle = Bundle.open(toy.bundle)
    executor = open_executor(bundle, EngineOptions())
    engine = AsyncEngine(open_engine(bundle, executor, EngineOptions(), observer), queue, on_close=executor.close)
    try:
        yield engine
    finally:
        assert await asyncio.to_thread(engine.close, PATIENCE_S)


def requested(name: str, prompt: list[int] | None = None, params: SamplingParams | None = None) -> Request:
    return Request(name, prompt or [1, 2, 3], params or greedy())


async def tokens_of(stream: Stream) -> list[int]:
    return [t async for updates in stream for u in updates for t in u.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 2 * PATIENCE_S))


@default_cases(2)
def test_many_at_once_get_what_each_gets_alone(toy: Toy, trusted: ToyReference) -> None:
    prompts = [[i, i + 1, 7] * (1 + i % 4) for i in range(30)]

    async def test() -> None:
        async with running(toy) as engine:
            streams = [engine.submit(requested(str(i), p, greedy(1 + i % 9))) for i, p in enumerate(prompts)]
            built = await asyncio.gather(*map(tokens_of, streams))
            assert built == [trusted.greedy(p, 1 + i % 9) for i, p in enumerate(prompts)]
            await until(lambda: engine.stats.running == 0)
            assert (engine.in_flight, engine.stats.waiting, engine.stats.kv_cache_usage) == (0, 0, 0.0)

    run(test())


def test_the_queue_is_bounded_and_says_when_to_come_back(toy: Toy, gate: Gate) -> None:
    async def test() -> None:
        async with running(toy, queue=3) as engine:
            streams = [engine.submit(requested(str(i))) for i in range(4 + 3)]
            with pytest.raises(OverloadedError, match="the queue is full: 7 sequences run or wait") as refused:
                engine.submit(requested("8"))
            assert 1 <= refused.value.retry_after_s <= 60
            gate.open()
            assert all([len(await tokens_of(s)) == 4 for s in streams])
            await until(lambda: engine.in_flight == 0)
            assert len(await tokens_of(engine.submit(requested("9")))) == 4

    run(test())


def test_what_grows_with_a_request_is_done_once_for_all_its_choices_and_beside_the_loop(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred bad words of 8 choices were tokenised eight times, on the event loop."""
    built: list[tuple[str, str]] = []

    def watch(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def watched(*args: Any, **more: Any) -> Any:
            built.append((name, threading.current_thread().name))
            return plain(*args, **more)

        monkeypatch.setattr(owner, name, watched)

    params = SamplingParams(
        max_tokens=2, n=8, temperature=1.0, seed=1, ignore_eos=True, bad_words=["ab"] * 100, stop=["xyz", "zyx"]
    )

    async def test() -> None:
        async with running(toy) as engine:
            watch(llm_engine, "bad_word_ids")
            watch(llm_engine, "StopStrings")
            watch(type(engine.engine.core), "check")
            stream = await engine.open(requested("a", None, params))
            assert len(await tokens_of(stream)) == 16
        assert [name for name, _ in built] == ["check", "bad_word_ids", "StopStrings"]
        here = threading.current_thread().name
        assert all(thread not in (here, "llmc-engine") for _, thread in built)

    run(test())


def test_a_cancelled_request_frees_its_slot_before_the_next_step(toy: Toy, gate: Gate) -> None:
    async def test() -> None:
        watcher = Watcher()
        async with running(toy, observer=watcher) as engine:
            streams = [engine.submit(requested(str(i), [i, 1], greedy(20))) for i in range(4)]
            fifth = engine.submit(requested("5", [9, 9], greedy(2)))
            await until(gate.waiting.is_set)
            streams[0].cancel()
            streams[0].cancel()
            gate.step()
            await until(lambda: bool(watcher.ended))
            assert watcher.ended[0].finish_reasons == ("abort",)
            last = [u async for updates in streams[0] for u in updates][-1]
            assert last.finish_reason == "abort"
            gate.open()
            assert len(await tokens_of(fifth)) == 2
            for stream in streams[1:]:
                stream.cancel()
            await until(lambda: engine.in_flight == engine.stats.running == 0)
            assert len(watcher.ended) == 5

    run(test())


def test_a_request_is_counted_out_before_its_end_is_sent(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    at_end: list[int] = []
    put = Stream.put

    def watched(stream: Stream, updates: list[Update] | None) -> None:
        if updates and updates[-1].finish_reason is not None:
            at_end.append(stream._engine.stats.running)
        put(stream, updates)

    monkeypatch.setattr(Stream, "put", watched)

    async def test() -> None:
        async with running(toy) as engine:
            await tokens_of(engine.submit(requested("a")))
            stream = engine.submit(requested("b", params=greedy(20)))
            stream.cancel()
            await tokens_of(stream)

    run(test())
    assert at_end == [0, 0]


def test_the_same_id_twice_is_refused(toy: Toy, gate: Gate) -> None:
    async def test() -> None:
        async with running(toy) as engine:
            engine.submit(requested("a"))
            with pytest.raises(InputError, match="a request with id 'a' runs already"):
                engine.submit(requested("a"))
            gate.open()

    run(test())


def test_a_drain_finishes_what_was_accepted_and_refuses_the_rest(toy: Toy, gate: Gate) -> None:
    async def test() -> None:
        async with running(toy) as engine:
            streams = [engine.submit(requested(str(i))) for i in range(6)]
            draining = asyncio.create_task(engine.drain(PATIENCE_S))
            await until(lambda: engine.draining)
            with pytest.raises(OverloadedError, match="shutting down"):
                engine.submit(requested("late"))
            gate.open()
            assert await draining == 0
            assert all([len(await tokens_of(s)) == 4 for s in streams])

    run(test())


def test_a_drain_that_takes_too_long_cancels_the_rest(toy: Toy, gate: Gate) -> None:
    async def test() -> None:
        async with running(toy) as engine:
            streams = [engine.submit(requested(str(i), None, greedy(25))) for i in range(2)]
            await until(gate.waiting.is_set)
            requested_so_far = len(engine._commands)
            draining = asyncio.create_task(engine.drain(0.05))
            await until(
                lambda: len(engine._commands) == requested_so_far + 2
            )  # the time is up: both are to be cancelled
            gate.open()
            assert await draining == 2
            for stream in streams:
                assert [u async for updates in stream for u in updates][-1].finish_reason == "abort"
            assert engine.in_flight == 0

    run(test())


def test_an_engine_that_fails_reports_everyone(toy: Toy, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with running(toy) as engine:
            streams = [engine.submit(requested(str(i))) for i in range(6)]
            gate.failing = RuntimeError("the device fell off the bus")
            gate.open()
            for stream in streams:
                with pytest.raises(EngineDeadError, match=r"stopped on an error \(RuntimeError\)") as dead:
                    await tokens_of(stream)
                assert "bus" not in str(dead.value)
            with pytest.raises(EngineDeadError):
                engine.submit(requested("late"))
            assert isinstance(engine.error, RuntimeError) and engine.in_flight == 0

    run(test())
    assert "the device fell off the bus" in caplog.text


def test_a_closed_engine_takes_nothing(toy: Toy) -> None:
    async def test() -> None:
        async with running(toy) as engine:
            engine.close(PATIENCE_S)
            with pytest.raises(EngineDeadError, match="closed"):
                engine.submit(requested("late"))

    run(test())


def test_closing_ends_streams_that_are_read(toy: Toy, gate: Gate) -> None:
    async def test() -> None:
        async with running(toy) as engine:
            stream = engine.submit(requested("a", None, greedy(25)))
            await until(gate.waiting.is_set)
            closing = asyncio.create_task(asyncio.to_thread(engine.close, PATIENCE_S))
            await until(lambda: engine._closing)
            gate.open()
            assert await closing
            with pytest.raises(EngineDeadError):
                await tokens_of(stream)

    run(test())


def test_nothing_stays_behind_when_streams_are_dropped(toy: Toy) -> None:
    async def test() -> None:
        async with running(toy) as engine:
            for i in range(20):
                stream = engine.submit(requested(str(i), None, greedy(25)))
                async for _ in stream:
                    break
                stream.cancel()
            await until(lambda: engine.in_flight == 0)
            gc.collect()
            await until(lambda: engine.stats.running == 0)  # they are the last step's, which comes after the last text

    run(test())


@full
def test_memory_stays_flat_however_many_requests_come_and_go(toy: Toy) -> None:
    async def one(engine: AsyncEngine, name: str, leaves: bool) -> None:
        stream = engine.submit(requested(name, [len(name), 7, 9] * 3, greedy(1 + len(name) % 7)))
        async for _ in stream:
            if leaves:
                break
        stream.cancel()

    async def some(engine: AsyncEngine, count: int, mark: str) -> int:
        for start in range(0, count, 20):
            await asyncio.gather(*(one(engine, f"{mark}{start + i}", i % 5 == 0) for i in range(20)))
        await until(lambda: engine.in_flight == 0)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    async def test() -> None:
        async with running(toy) as engine:
            before = await some(engine, 200, "a")
            assert await some(engine, 600, "b") - before < 64 << 10

    tracemalloc.start()
    try:
        run(test())
    finally:
        tracemalloc.stop()


class Blocking(Observer):
    """Holds up what is told of the first step until `free` is set, or fails at it."""

    def __init__(self, free: threading.Event, failing: BaseException | None = None) -> None:
        self.free, self.failing, self.reported = free, failing, 0

    def stepped(self, record: StepRecord) -> None:
        self.reported += 1
        assert self.free.wait(PATIENCE_S)
        if self.failing is not None:
            raise self.failing


def test_a_step_is_reported_while_the_next_one_runs(
    toy: Toy, trusted: ToyReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, second = itertools.count(1), threading.Event()
    use(monkeypatch, executor=watching(lambda step: second.set() if next(begun) == 2 else None))
    observer = Blocking(second)

    async def test() -> None:
        async with running(toy, observer=observer) as engine:
            assert await tokens_of(engine.submit(requested("a"))) == trusted.greedy([1, 2, 3], 4)

    run(test())
    assert observer.reported == 4


def test_at_most_one_step_runs_ahead_of_what_is_reported(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []
    use(monkeypatch, executor=watching(begun.append))
    free = threading.Event()

    async def test() -> None:
        async with running(toy, observer=Blocking(free)) as engine:
            stream = engine.submit(requested("a", None, greedy(20)))
            await until(lambda: len(begun) == 2)
            await asyncio.sleep(0.05)
            assert len(begun) == 2
            free.set()
            assert len(await tokens_of(stream)) == 20

    run(test())


def test_a_stop_string_ends_a_sequence_though_the_next_step_runs(toy: Toy) -> None:
    async def test() -> None:
        async with running(toy) as engine:
            whole = [u async for us in engine.submit(requested("a", None, greedy(8))) for u in us]
            index, stop = next((i, u.text) for i, u in enumerate(whole[:-1]) if u.text)
            stream = engine.submit(requested("b", None, greedy(8, stop=stop)))
            got = [u async for updates in stream for u in updates]
            assert [u.token_ids for u in got] == [u.token_ids for u in whole[: index + 1]]
            assert (got[-1].finish_reason, got[-1].stop_reason) == ("stop", stop)
            await until(lambda: engine.stats.running == 0 and engine.stats.kv_cache_usage == 0)
            assert len(await tokens_of(engine.submit(requested("c", None, greedy(8))))) == 8

    run(test())


def test_what_fails_as_a_step_is_reported_ends_the_engine(toy: Toy, caplog: pytest.LogCaptureFixture) -> None:
    free = threading.Event()
    free.set()

    async def test() -> None:
        async with running(toy, observer=Blocking(free, OSError("no space for the log"))) as engine:
            with pytest.raises(EngineDeadError, match=r"stopped on an error \(OSError\)"):
                await tokens_of(engine.submit(requested("a", None, greedy(20))))
            assert isinstance(engine.error, OSError)

    run(test())
    assert "no space for the log" in caplog.text


# The Python surface


def test_async_llm_yields_the_output_as_it_grows(toy: Toy, trusted: ToyReference) -> None:
    async def test() -> None:
        async with BundleAsyncLLM(toy.bundle) as llm:
            seen = []
            async for output in llm.generate([5, 6, 7], greedy(6), "r1"):
                assert output.request_id == "r1"
                seen.append(list(output.outputs[0].token_ids))
            wanted = trusted.greedy([5, 6, 7], 6)
            assert seen == [wanted[: i + 1] for i in range(6)] and output.finished
            params = greedy(6, output_kind=RequestOutputKind.DELTA)
            deltas = [list(o.outputs[0].token_ids) async for o in llm.generate([5, 6, 7], params)]
            assert deltas == [[t] for t in wanted]
            params = greedy(6, output_kind=RequestOutputKind.FINAL_ONLY)
            final = [list(o.outputs[0].token_ids) async for o in llm.generate([5, 6, 7], params)]
            assert final == [wanted]

    run(test())


def test_async_llm_aborts_by_id_and_by_leaving(toy: Toy, gate: Gate) -> None:
    async def test() -> None:
        async with BundleAsyncLLM(toy.bundle) as llm:
            generator = llm.generate([1], greedy(25), "a")
            task = asyncio.create_task(anext(generator))
            await until(gate.waiting.is_set)
            await llm.abort("a")
            await llm.abort("unknown")
            gate.open()
            await task
            rest = [o async for o in generator]
            assert rest[-1].outputs[0].finish_reason == "abort"
            async for _ in (left := llm.generate([1], greedy(25))):
                break
            await left.aclose()
            await until(lambda: llm.engine.in_flight == 0)

    run(test())


@default_cases(2)
def test_async_llm_chats(toy: Toy) -> None:
    async def test() -> None:
        async with BundleAsyncLLM(toy.bundle) as llm:
            outputs = [o async for o in llm.chat([{"role": "user", "content": "hi"}], greedy(3))]
            assert len(outputs[-1].outputs[0].token_ids) == 3
            with pytest.raises(InputError, match="messages"):
                async for _ in llm.chat([], greedy(3)):
                    pass

    run(test())


def test_async_llm_takes_one_prompt_at_a_time(toy: Toy) -> None:
    async def ask(llm: BundleAsyncLLM, *requested: Any) -> None:
        with pytest.raises(InputError, match=r"a prompt is a text|sampling_params must be"):
            async for _ in llm.generate(*requested):
                pass

    async def test() -> None:
        async with BundleAsyncLLM(toy.bundle) as llm:
            for wrong in (["a", "b"], [["a"]], b"text", None, [1.5]):
                await ask(llm, wrong)
            await ask(llm, "a", {"max_tokens": 2})

    run(test())
