"""A device's memory divided and its graphs captured, over the fake device; failures and lies are put in."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.bucket import PHASES, Bucket
from llmc.buckets.capture.options import CaptureOptions
from llmc.buckets.capture.order import STRATEGIES
from llmc.buckets.plan import Plan
from llmc.errors import DeviceError, InputError, OutOfDeviceMemoryError
from llmc.runtime.async_llm import BundleAsyncLLM
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors.base import Executor
from llmc.runtime.executors.fake.executor import FakeGraphDevice
from llmc.runtime.llm import BundleLLM
from llmc.runtime.startup.capturing import CaptureChoice, Capturing
from llmc.runtime.startup.opening import EngineOptions, open_engine, open_executor
from llmc.runtime.startup.outcome import WarmUpOutcome
from llmc.runtime.startup.warming import Warming
from tests.tiers import examples
from tests.toy import Toy, greedy

MEMORY = 1 << 20


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    built = Toy.make(tmp_path_factory.mktemp("capturing"))
    built.compile(device=f"fake:graphs={MEMORY}", verify="none")
    return built


def opened(toy: Toy, **options: Any) -> tuple[Executor, Capturing]:
    executor = open_executor(Bundle.open(toy.bundle), EngineOptions())
    capturing = Capturing.of(executor, toy.plan, CaptureChoice(CaptureOptions(**options)))
    assert capturing is not None
    return executor, capturing


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException, at: int = 4) -> list[Bucket]:
    """The device raises `error` in its capture number `at`, from 1; the buckets whose capture began."""
    begun: list[Bucket] = []
    honest = FakeGraphDevice.capture

    def capture(self: FakeGraphDevice, bucket: Bucket) -> int:
        begun.append(bucket)
        if len(begun) == at:
            raise error
        return honest(self, bucket)

    monkeypatch.setattr(FakeGraphDevice, "capture", capture)
    return begun


def captured(capturing: Capturing) -> list[Bucket]:
    assert capturing.outcome is not None
    return [graph.bucket for phase in capturing.outcome.phases for graph in phase.captured]


def warm_up(executor: Executor, capturing: Capturing, plan: Plan) -> WarmUpOutcome:
    outcome = WarmUpOutcome(executor, Warming(executor, plan), capturing)
    outcome.run()
    return outcome


def served(executor: Executor, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens through the engine that serves."""
    from llmc.runtime.engine.requests import Request
    from llmc.runtime.engine.sampling.params import SamplingParams

    engine = open_engine(executor.bundle, executor, EngineOptions())
    built: list[int] = []
    engine.add(engine.prepare(Request("one", prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))))
    while len(built) < count:
        built += [token for update in engine.step() for token in update.token_ids]
    return built


# Memory


def test_the_cache_is_sized_from_what_the_profile_run_leaves_and_slots_follow(toy: Toy) -> None:
    executor, capturing = opened(toy, gpu_memory_utilization=0.5, graph_reserved_mem=0.2)
    memory = capturing.divide()
    assert memory.kv_cache <= 0.4 * memory.free < memory.kv_cache + memory.block_bytes
    assert executor.slots == memory.blocks * memory.block_tokens // executor.capacity
    assert executor.memory()["cache"] == executor.slots * executor.capacity * 8 * 4
    assert capturing.device.free_memory() == memory.free_for_capture


@examples(15, database=None)
@given(
    st.floats(0.2, 0.9), st.floats(0, 0.5), st.floats(0, 1), st.sampled_from(sorted(STRATEGIES)),
    st.sampled_from(sorted(STRATEGIES)),
)  # fmt: skip
def test_whatever_the_shares_the_margin_stays_and_every_bucket_is_captured_or_named(
    toy: Toy, used: float, reserved: float, ratio: float, prompt: str, decode: str
) -> None:
    executor, capturing = opened(
        toy, gpu_memory_utilization=used, graph_reserved_mem=reserved, graph_prompt_ratio=ratio,
        prompt_strategy=prompt, decode_strategy=decode,
    )  # fmt: skip
    found = warm_up(executor, capturing, toy.plan)
    outcome = capturing.outcome
    assert outcome is not None and capturing.memory is not None and not found.failed
    assert sorted(captured(capturing) + [one.bucket for one in outcome.uncaptured]) == sorted(toy.plan.buckets)
    assert outcome.used <= outcome.budget or outcome.notes
    assert capturing.device.free_memory() == outcome.free - outcome.used


def test_a_device_that_holds_no_sequence_is_refused_with_what_to_change(tmp_path: Path) -> None:
    toy = Toy.make(tmp_path)
    toy.compile(device="fake:graphs=22000", verify="none")
    _, capturing = opened(toy)
    with pytest.raises(InputError, match=r"one sequence of 33 tokens needs 5: raise --gpu-memory-utilization"):
        capturing.divide()


def test_what_a_bucket_that_failed_in_the_warm_up_would_capture_is_not_tried(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, capturing = opened(toy, graph_reserved_mem=0.5)
    broken = toy.plan.decode[1]
    honest = executor.run

    def run(step: Any) -> Any:
        if (step.phase, step.batch, step.context) == (broken.phase, broken.batch, broken.context):
            raise RuntimeError("out of registers")
        return honest(step)

    monkeypatch.setattr(executor, "run", run)
    assert list(warm_up(executor, capturing, toy.plan).failed) == [broken]
    assert sorted([*captured(capturing), broken]) == sorted(toy.plan.buckets)


# The same text


@pytest.mark.parametrize("reserved", [0.0, 0.01, 0.5])
def test_what_is_captured_and_what_is_not_serve_the_same_text(toy: Toy, reserved: float) -> None:
    executor, capturing = opened(toy, graph_reserved_mem=reserved)
    warm_up(executor, capturing, toy.plan)
    assert bool(captured(capturing)) == (reserved > 0)
    prompt = [5, 6, 7, 8, 9]
    assert [served(executor, prompt, 9)] == greedy(toy.model, [prompt], 9)


# Lines


def test_a_start_is_logged_in_the_guides_form(toy: Toy, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "llmc")
    executor, capturing = opened(toy, graph_reserved_mem=0.005)
    warm_up(executor, capturing, toy.plan)
    size = r"[\d.]+ (B|[KM]iB)"
    forms = [
        rf"Loading model weights took {size} of device memory \({size}/1 MiB used\)",
        rf"Model profiling run took {size} of device memory \({size}/1 MiB used\)",
        rf"Free device memory: {size}, {size} usable \(gpu_memory_utilization=0.9\), {size} reserved for fake graphs "
        rf"\(VLLM_GRAPH_RESERVED_MEM=0.005\), {size} reserved for KV cache",
        rf"Initializing cache engine took {size} of device memory \({size}/1 MiB used\)",
        rf"\[Warmup\]\[Prompt\]\[1/6\] batch_size:4 query_len:8 num_blocks:0 free_mem:{size}",
        rf"Using {size}/{size} of free device memory for fake graphs, {size} for prompt and {size} for decode "
        r"\(VLLM_GRAPH_PROMPT_RATIO=0.3\)",
        rf"\[Warmup\]\[Graph/Prompt\]\[1/6\] batch_size:1 query_len:4 num_blocks:0 free_mem:{size}",
        rf"Graph/Prompt captured:\d \([\d.]+%\) used_mem:{size} buckets:\[\(1, 4, 0\).*\]",
        rf"Graph/Decode captured:\d \([\d.]+%\) used_mem:{size} buckets:\[.*\]",
        rf"runs uncaptured: prompt \(4, 8, 0\), does not fit: about {size}, {size} left",
        rf"Warmup finished in \d+ secs, allocated {size} of device memory",
    ]
    lines = iter(caplog.messages)
    for form in forms:
        assert any(re.fullmatch(form, line) for line in lines), form
    assert all(record.levelno == logging.INFO for record in caplog.records)


# A device that fails, lies or is interrupted


def test_out_of_memory_in_the_middle_keeps_the_graphs_and_serves(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun = failing(monkeypatch, OutOfDeviceMemoryError("synStatus 26"))
    executor, capturing = opened(toy, graph_reserved_mem=0.5)
    assert not warm_up(executor, capturing, toy.plan).failed
    assert captured(capturing) == begun[:3]
    outcome = capturing.outcome
    assert outcome is not None
    whys = {one.bucket: one.why for one in outcome.uncaptured}
    assert whys.pop(begun[3]) == "the device ran out of memory"
    assert set(whys.values()) == {f"the device ran out of memory while capturing {begun[3]}"}
    assert any(f"ran out of memory while capturing {begun[3]}" in r.message and r.levelno == logging.WARNING
               for r in caplog.records)  # fmt: skip
    assert [served(executor, [5, 6, 7], 6)] == greedy(toy.model, [[5, 6, 7]], 6)


def test_a_bucket_that_the_device_cannot_capture_is_named_and_the_others_are_captured(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = failing(monkeypatch, DeviceError("an operator of it runs on the host"))
    executor, capturing = opened(toy, graph_reserved_mem=0.5)
    warm_up(executor, capturing, toy.plan)
    assert capturing.outcome is not None
    [left] = capturing.outcome.uncaptured
    assert (left.bucket, left.why) == (begun[3], "the device cannot capture it: an operator of it runs on the host")


def test_an_interrupt_in_the_middle_keeps_and_shows_what_is_captured(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = failing(monkeypatch, KeyboardInterrupt())
    executor, capturing = opened(toy, graph_reserved_mem=0.5)
    found = warm_up(executor, capturing, toy.plan)
    assert found.interrupted and not found.again
    assert captured(capturing) == begun[:3]
    assert capturing.outcome is not None
    assert {one.why for one in capturing.outcome.uncaptured} == {"not captured yet"}
    shown = "\n".join(capturing.report())
    assert "Graph/Prompt captured:3 (50.0%)" in shown and "not captured yet" in shown
    assert found.to_dict()["graphs"]["prompt"]["percent"] == 50


def test_a_graph_that_does_not_give_what_its_bucket_gave_fails_in_the_replay(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, capturing = opened(toy, graph_reserved_mem=0.5)
    honest = FakeGraphDevice.inputs

    def inputs(self: FakeGraphDevice, step: Any, past: Any) -> Any:
        if Bucket(step.phase, step.batch, step.query, step.context) in self._captured:
            raise DeviceError("the graph's recipe is stale")
        return honest(self, step, past)

    monkeypatch.setattr(FakeGraphDevice, "inputs", inputs)
    assert sorted(warm_up(executor, capturing, toy.plan).failed) == sorted(toy.plan.buckets)


def test_a_device_with_less_than_it_says_is_out_of_memory_at_the_cache(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeGraphDevice, "total_memory", lambda self: 64 * MEMORY)
    monkeypatch.setattr(FakeGraphDevice, "free_memory", lambda self: self._left + 63 * MEMORY)
    _, capturing = opened(toy)
    with pytest.raises(OutOfDeviceMemoryError, match="a KV cache of"):
        capturing.divide()


@pytest.mark.parametrize("shown", [-1, None, 0.5, 2 * MEMORY])
def test_a_device_that_states_no_bytes_or_too_many_is_named(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, shown: object
) -> None:
    monkeypatch.setattr(FakeGraphDevice, "free_memory", lambda self: shown)
    _, capturing = opened(toy)
    with pytest.raises(DeviceError, match=r"the device reports .* of memory"):
        capturing.divide()


def test_a_device_that_understates_its_graphs_is_charged_with_what_is_gone(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = FakeGraphDevice.capture
    outcomes = []
    for capture in (honest, lambda self, bucket: honest(self, bucket) // 10):
        monkeypatch.setattr(FakeGraphDevice, "capture", capture)
        executor, capturing = opened(toy, graph_reserved_mem=0.012)
        warm_up(executor, capturing, toy.plan)
        outcomes.append(capturing.outcome)
    assert outcomes[0] == outcomes[1]
    assert captured(capturing)


def test_a_budget_too_small_for_one_graph_says_so_and_serves(toy: Toy, caplog: pytest.LogCaptureFixture) -> None:
    executor, capturing = opened(toy, graph_reserved_mem=0.0005)
    warm_up(executor, capturing, toy.plan)
    assert captured(capturing) == []
    assert re.fullmatch(
        r"no graph fits in [\d.]+ B: the smallest, prompt\[1x4\+0\], takes about 1.176 KiB; raise "
        r"--graph-reserved-mem or --gpu-memory-utilization, or run without graphs \(--graph-reserved-mem 0\)",
        capturing.failure,
    )
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [capturing.failure]
    assert [served(executor, [5, 6, 7], 6)] == greedy(toy.model, [[5, 6, 7]], 6)


def test_no_graphs_at_all_may_be_requested(toy: Toy) -> None:
    executor, capturing = opened(toy, graph_reserved_mem=0)
    warm_up(executor, capturing, toy.plan)
    assert (captured(capturing), capturing.failure) == ([], "")


# Devices without graphs


def test_on_a_device_that_captures_none_a_flag_is_refused_and_a_variable_is_not(toys: dict[str, Toy]) -> None:
    executor = open_executor(Bundle.open(toys["static"].bundle), EngineOptions())
    plan = toys["static"].plan
    assert Capturing.of(executor, plan, CaptureChoice(CaptureOptions(graph_reserved_mem=0.4))) is None
    with pytest.raises(InputError, match=r"--graph-reserved-mem: fake captures no graphs, .*; leave it out"):
        Capturing.of(executor, plan, CaptureChoice(CaptureOptions(), ("--graph-reserved-mem",)))


def test_progress_counts_runs_captures_and_replays(toy: Toy) -> None:
    executor, capturing = opened(toy, graph_reserved_mem=0.01)
    reported: list[tuple[int, int]] = []
    WarmUpOutcome(executor, Warming(executor, toy.plan), capturing).run(
        lambda _, done, total: reported.append((done, total))
    )
    graphs = len(captured(capturing))
    assert 0 < graphs < len(toy.plan.buckets)
    assert [done for done, _ in reported] == list(range(1, len(reported) + 1))
    assert reported[0][1] == 3 * len(toy.plan.buckets)
    assert reported[-1] == (2 * len(toy.plan.buckets) + graphs,) * 2
    assert {bucket.phase for bucket in captured(capturing)} <= set(PHASES)


# From Python

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def torn(*_: object) -> None:
    raise DeviceError("torn")


@pytest.mark.parametrize("chosen", [True, CaptureOptions(gpu_memory_utilization=0.5, graph_reserved_mem=0.2)])
def test_llm_captures_where_it_is_requested_to_warm_up(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, chosen: bool | CaptureOptions
) -> None:
    begun = failing(monkeypatch, DeviceError("never"), at=-1)
    with BundleLLM(toy.bundle) as lazy:
        assert not begun
        wanted = lazy.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids
    with BundleLLM(toy.bundle, warm_up=chosen) as llm:
        assert sorted(begun) == sorted(toy.plan.buckets)
        assert llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids == wanted
        assert llm.compilations == 0


def test_an_async_llm_does_too_and_what_fails_in_it_is_raised(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = failing(monkeypatch, DeviceError("never"), at=-1)
    BundleAsyncLLM(toy.bundle, warm_up=True).shutdown()
    assert sorted(begun) == sorted(toy.plan.buckets)
    for kind in (BundleLLM, BundleAsyncLLM):
        monkeypatch.setattr(FakeGraphDevice, "inputs", torn)
        with pytest.raises(DeviceError, match="torn"):
            kind(toy.bundle, warm_up=True)
