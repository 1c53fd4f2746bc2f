"""A warm-up: which steps, in which order, and what becomes of buckets that do not run."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from llmc.buckets.bucket import Bucket
from llmc.buckets.capture.order import warm_up_order
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors.base import Executor
from llmc.runtime.startup import warming as module
from llmc.runtime.startup.opening import EngineOptions, open_executor
from llmc.runtime.startup.outcome import WarmUpOutcome
from llmc.runtime.startup.warming import Warming
from tests.devices import use, watching
from tests.toy import Toy


class Ran:
    """The buckets that steps ran in; `raises` is asked before each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.buckets: list[Bucket] = []
        self.raises: Callable[[Bucket], BaseException | None] = lambda _: None
        use(monkeypatch, executor=watching(self._seen))

    def _seen(self, step: Any) -> None:
        bucket = Bucket(step.phase, step.batch, step.query, step.context)
        self.buckets.append(bucket)
        if (error := self.raises(bucket)) is not None:
            raise error


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    return Ran(monkeypatch)


@pytest.fixture
def bundle(toys: dict[str, Toy]) -> Bundle:
    """One executable a bucket."""
    return Bundle.open(toys["static"].bundle)


@pytest.fixture
def executor(bundle: Bundle, ran: Ran) -> Executor:
    return open_executor(bundle, EngineOptions())


# Order


def test_prompts_come_first_and_of_each_phase_the_largest(bundle: Bundle, executor: Executor, ran: Ran) -> None:
    warmed = list(Warming(executor, bundle.plan).run())
    assert ran.buckets == [one.bucket for one in warmed] == warm_up_order(bundle.plan.buckets)
    assert ran.buckets[0] == max(bundle.plan.prompt, key=lambda b: b.batch * b.query)
    assert all(one.seconds > 0 and one.error is None for one in warmed)


def test_where_traffic_is_known_the_bucket_that_it_uses_most_comes_first(bundle: Bundle, executor: Executor) -> None:
    hot = bundle.plan.decode[0]
    assert Warming(executor, bundle.plan, uses={hot: 9}).steps[0].bucket == hot


def test_the_smallest_of_each_phase_may_be_all(bundle: Bundle, executor: Executor, ran: Ran) -> None:
    list(Warming(executor, bundle.plan, smallest=True).run())
    assert ran.buckets == [bundle.plan.prompt[0], bundle.plan.decode[0]]


def test_where_any_shape_runs_a_prompt_and_a_decode_step_are_all(toys: dict[str, Toy], ran: Ran) -> None:
    exact = Bundle.open(toys["exact"].bundle)
    assert all(w.error is None for w in Warming(open_executor(exact, EngineOptions()), exact.plan).run())
    assert [bucket.phase for bucket in ran.buckets] == ["prompt", "decode"]


# Lines


def test_each_bucket_has_a_line_of_the_guide_before_it_runs(
    bundle: Bundle, executor: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "llmc")
    warming = Warming(executor, bundle.plan)
    next(warming.run())
    assert len(caplog.messages) == 1
    form = r"\[Warmup\]\[Prompt\]\[1/\d+\] batch_size:\d+ query_len:\d+ num_blocks:\d+ free_mem:[\d.]+ [KMGT]iB"
    assert re.fullmatch(form, caplog.messages[0])


def test_a_host_that_does_not_tell_its_free_memory_is_said_to_be_one(
    bundle: Bundle, executor: Executor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "available_memory", lambda: None)
    caplog.set_level(logging.INFO, "llmc")
    next(Warming(executor, bundle.plan).run())
    assert caplog.messages[0].endswith("free_mem:unknown")


# Two passes


def test_every_bucket_runs_and_then_replays_with_nothing_compiled(bundle: Bundle, executor: Executor, ran: Ran) -> None:
    outcome = WarmUpOutcome(executor, Warming(executor, bundle.plan))
    reported: list[tuple[int, int]] = []
    outcome.run(lambda _, done, total: reported.append((done, total)))
    order, count = warm_up_order(bundle.plan.buckets), len(bundle.plan.buckets)
    assert ran.buckets == order + order
    assert reported == [(i + 1, 2 * count) for i in range(2 * count)]
    assert (executor.compilations.count, outcome.failed, outcome.missing) == (0, {}, [])
    assert outcome.phase("prompt").warm == len(bundle.plan.prompt)


def test_what_an_engine_opens_in_a_replay_counts_as_compiled(bundle: Bundle, executor: Executor, ran: Ran) -> None:
    outcome = WarmUpOutcome(executor, Warming(executor, bundle.plan))

    def reopened(bucket: Bucket) -> None:
        if ran.buckets.count(bucket) == 2:
            executor.compilations.loaded(str(bucket))

    ran.raises = reopened
    outcome.run()
    assert executor.compilations.count == len(bundle.plan.buckets)


def test_a_bucket_that_raises_is_named_and_the_others_are_warmed(bundle: Bundle, executor: Executor, ran: Ran) -> None:
    broken = bundle.plan.decode[1]
    ran.raises = lambda bucket: RuntimeError("out of registers") if bucket == broken else None
    outcome = WarmUpOutcome(executor, Warming(executor, bundle.plan))
    outcome.run()
    assert {b: str(e) for b, e in outcome.failed.items()} == {broken: "out of registers"}
    assert ran.buckets.count(broken) == 1
    assert outcome.phase("decode").warm == len(bundle.plan.decode) - 1
    [reported] = [one for one in outcome.to_dict()["buckets"] if one["error"]]
    assert reported == {
        "phase": "decode", "bucket": [broken.batch, 1, broken.context], "first_s": reported["first_s"],
        "replay_s": None, "error": "RuntimeError: out of registers",
    }  # fmt: skip


def test_a_bucket_whose_replay_alone_raises_is_named_too(bundle: Bundle, executor: Executor, ran: Ran) -> None:
    ran.raises = lambda bucket: MemoryError("full") if ran.buckets.count(bucket) == 2 else None
    outcome = WarmUpOutcome(executor, Warming(executor, bundle.plan))
    outcome.run()
    assert list(outcome.failed) == warm_up_order(bundle.plan.buckets)
    assert outcome.phase("prompt").failed == len(bundle.plan.prompt)


def test_an_interrupt_keeps_what_ran_and_names_the_rest(bundle: Bundle, executor: Executor, ran: Ran) -> None:
    order = warm_up_order(bundle.plan.buckets)
    ran.raises = lambda bucket: KeyboardInterrupt() if bucket == order[3] else None
    outcome = WarmUpOutcome(executor, Warming(executor, bundle.plan))
    outcome.run()
    assert outcome.interrupted
    assert list(outcome.first) == order[:3]
    assert outcome.missing == order
