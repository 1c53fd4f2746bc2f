"""The engine, token by token, over the fake executor: every token checked against the toy model's reference.

Every kind of bundle runs every test: one executable a bucket, one for any shape, and one for ragged steps, with and
without a pool of tokens that slots share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.compiler.verification.toy_reference import ToyReference
from llmc.errors import DeviceError, InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.batched_core import BatchedCore
from llmc.runtime.engine.observer import StepRecord
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.fake.executor import FakeExecutor
from llmc.runtime.llm import BundleLLM
from llmc.testing.toy import VOCAB
from tests.devices import use
from tests.tiers import default_cases, examples
from tests.toy import Toy

PROPERTY = examples(60, database=None, derandomize=True)
LONGEST, LENGTH, SEQS = 31, 32, 4


@dataclass(frozen=True)
class Requested:
    prompt: Sequence[int]
    params: SamplingParams
    ends: Sequence[int] = ()


@pytest.fixture(scope="module", params=[0, 2], ids=["no spare slot", "two spare slots"])
def engine(toy: Toy, request: pytest.FixtureRequest) -> Iterator[BatchedCore]:
    """One engine for the module: what earlier tests left in its cache must not matter either."""
    bundle = Bundle.open(toy.bundle)
    executor = open_executor(bundle, SEQS + request.param)
    yield BatchedCore(bundle.plan, executor, VOCAB, min_prefix=2)
    executor.close()


def greedy(max_tokens: int | None = 4, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **params)


class Run:
    """Runs what was asked for to its end; `records` has the steps it took, `built` tokens and reason of each."""

    def __init__(
        self, engine: BatchedCore, requested: Sequence[Requested], cancel: dict[int, int] | None = None
    ) -> None:
        self.records: list[StepRecord] = []
        self.built: list[tuple[list[int], str | None]] = []
        numbers = range(engine.steps * 100, engine.steps * 100 + len(requested))
        for one in requested:
            engine.check(one.prompt)
        samplers = [engine.sampler(a.prompt, a.params, a.ends) for a in requested]
        for number, one, sampler in zip(numbers, requested, samplers, strict=True):
            engine.add(number, one.prompt, sampler)
        tokens: dict[int, list[int]] = {n: [] for n in numbers}
        reasons: dict[int, str | None] = dict.fromkeys(numbers)
        while engine.has_work:
            outcome = engine.step()
            assert outcome is not None
            self.records.append(outcome.record)
            for token in outcome.tokens:
                assert reasons[token.sequence] is None, "no token after the last one"
                tokens[token.sequence].append(token.token_id)
                reasons[token.sequence] = token.finish_reason
                index = token.sequence - numbers.start
                if cancel and cancel.get(index) == len(tokens[token.sequence]):
                    engine.cancel(token.sequence)
        assert engine.step() is None
        occupancy = engine.scheduler.occupancy
        assert (occupancy.waiting, occupancy.prefilling, occupancy.decoding, occupancy.live_tokens) == (0, 0, 0, 0)
        self.built = [(tokens[n], reasons[n]) for n in numbers]
        self.numbers = numbers


def run(engine: BatchedCore, requested: Sequence[Requested]) -> list[tuple[list[int], str | None]]:
    return Run(engine, requested).built


def one(
    engine: BatchedCore, prompt: Sequence[int], params: SamplingParams, ends: Sequence[int] = ()
) -> tuple[list[int], str | None]:
    return run(engine, [Requested(prompt, params, ends)])[0]


def fresh(toy: Toy, **options: Any) -> BatchedCore:
    bundle = Bundle.open(toy.bundle)
    return BatchedCore(bundle.plan, open_executor(bundle, SEQS + 2), VOCAB, **options)


# Limits


@pytest.mark.parametrize(("prompt", "message"), [
    ([], "the prompt is empty: it has no token"),
    ([1] * 32, r"the prompt has 32 tokens; this bundle takes at most 31 \(max_model_len 32, one token left to"),
    ([1, VOCAB, 2], f"prompt token ids must be in 0 … {VOCAB - 1}, found {VOCAB}"),
    ([1, -5, 2], f"prompt token ids must be in 0 … {VOCAB - 1}, found -5"),
])  # fmt: skip
def test_a_prompt_that_cannot_run_says_why_before_anything_runs(
    engine: BatchedCore, prompt: list[int], message: str
) -> None:
    steps = engine.steps
    with pytest.raises(InputError, match=message) as caught:
        run(engine, [Requested([1, 2], greedy()), Requested(prompt, greedy())])
    assert caught.value.exit_code == 2
    assert engine.steps == steps, "the good prompt of the group has not run either"


def test_ids_outside_the_vocabulary_in_parameters(engine: BatchedCore) -> None:
    with pytest.raises(InputError, match=f"{VOCAB} is not below the vocabulary size {VOCAB}"):
        run(engine, [Requested([1], greedy(stop_token_ids=[VOCAB]))])


def test_nothing_to_do_is_no_step(engine: BatchedCore) -> None:
    assert engine.step() is None and not engine.has_work


# Ends


@pytest.mark.parametrize("count", [1, 2, 9])
def test_max_tokens(engine: BatchedCore, trusted: ToyReference, count: int) -> None:
    assert one(engine, [5, 6, 7], greedy(count)) == (trusted.greedy([5, 6, 7], count), "length")


@pytest.mark.parametrize("max_tokens", [None, 100])
@pytest.mark.parametrize("length", [1, 20, LONGEST])
def test_max_model_len(engine: BatchedCore, trusted: ToyReference, length: int, max_tokens: int | None) -> None:
    prompt = list(range(length))
    assert one(engine, prompt, greedy(max_tokens)) == (trusted.greedy(prompt, LENGTH - length), "length")


@pytest.mark.parametrize("index", range(4))
def test_the_models_end_token_ends(engine: BatchedCore, trusted: ToyReference, index: int) -> None:
    prompt = [9, 8, 7]
    tokens = trusted.greedy(prompt, 6)
    end = tokens[index]
    assert tokens.index(end) == index
    assert one(engine, prompt, greedy(6), [end]) == (tokens[: index + 1], "stop")
    assert one(engine, prompt, greedy(6), [VOCAB - 2, end]) == (tokens[: index + 1], "stop")
    assert one(engine, prompt, greedy(6, ignore_eos=True), [end]) == (tokens, "length")
    assert one(engine, prompt, greedy(index + 1), [end]) == (tokens[: index + 1], "stop"), "not length"


def test_stop_token_ids_end_whatever_ignore_eos_says(engine: BatchedCore, trusted: ToyReference) -> None:
    tokens = trusted.greedy([9, 8, 7], 6)
    for ignore in (False, True):
        params = greedy(6, stop_token_ids=[tokens[2]], ignore_eos=ignore)
        assert one(engine, [9, 8, 7], params) == (tokens[:3], "stop")


def test_min_tokens_holds_end_tokens_back(engine: BatchedCore, trusted: ToyReference) -> None:
    """An end token that would come too early is not chosen: the next best token is."""
    prompt = [9, 8, 7]
    end = trusted.greedy(prompt, 1)[0]
    tokens: list[int] = []
    while len(tokens) < 3:
        logits = trusted.logits([*prompt, *tokens], [len(prompt) + len(tokens) - 1])[0]
        logits[end] = -np.inf
        tokens.append(int(logits.argmax()))
    built, reason = one(engine, prompt, greedy(8, min_tokens=3), [end])
    assert built[:3] == tokens
    assert (reason == "stop") == (built[-1] == end)


def test_a_cancelled_sequence_ends_and_the_others_do_not_notice(engine: BatchedCore, trusted: ToyReference) -> None:
    prompts = [[1, 2], [3], [4, 5, 6], [7]]
    built = Run(engine, [Requested(p, greedy(8)) for p in prompts], cancel={0: 3, 2: 1}).built
    wanted = [trusted.greedy(p, n) for p, n in zip(prompts, (3, 8, 1, 8), strict=True)]
    assert [tokens for tokens, _ in built] == wanted
    engine.cancel(99)  # unknown, or long finished: nothing happens


# Batches

prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=LONGEST)
requested = st.tuples(prompts, st.integers(1, 12), st.sampled_from([None, None, 0, 1, 3]))


@default_cases(1)
@PROPERTY
@given(st.lists(requested, min_size=1, max_size=9))
def test_every_request_gets_what_it_gets_alone(
    engine: BatchedCore, trusted: ToyReference, requests: list[tuple[list[int], int, int | None]]
) -> None:
    """Random lengths, more prompts than slots, ends at random times, so that sequences move between slots."""
    group, wanted = [], []
    for prompt, most, stop_at in requests:
        count = min(most, LENGTH - len(prompt))
        tokens = trusted.greedy(prompt, count)
        if stop_at is not None and stop_at < count:
            end = tokens[stop_at]
            group.append(Requested(prompt, greedy(count), [end]))
            wanted.append((tokens[: tokens.index(end) + 1], "stop"))
        else:
            group.append(Requested(prompt, greedy(count)))
            wanted.append((tokens, "length"))
    done = Run(engine, group)
    assert done.built == wanted
    assert [one(engine, r.prompt, r.params, r.ends) for r in group] == wanted
    check_records(engine, done.records)


def check_records(engine: BatchedCore, records: Sequence[StepRecord]) -> None:
    """Every step ran in the least bucket that covers it, its live rows in the first slots."""
    buckets = {(b.phase, b.batch, b.query, b.context) for b in engine.plan.buckets}
    for record in records:
        assert record.live_rows == len(record.requests) == len(set(record.requests))
        assert min(record.prepare_s, record.execute_s, record.sample_s) >= 0
        if engine.executor.capabilities.exact:
            assert record.padding_tokens == 0 and record.executable == "any"
            assert record.live_rows == record.batch
        else:
            assert (record.phase, record.batch, record.query, record.context) in buckets
            sizes = f"batch={record.batch} query={record.query} context={record.context}"
            assert record.executable == f"{record.phase} {sizes}"
        if record.phase == "decode":
            assert record.padding_tokens == record.batch - record.live_rows


def test_seeded_sampling_does_not_depend_on_the_batch(engine: BatchedCore) -> None:
    params = [SamplingParams(max_tokens=7, temperature=1.0, top_p=0.9, seed=i) for i in range(6)]
    group = [Requested([i, i + 1, 50], p) for i, p in enumerate(params)]
    assert run(engine, group) == [one(engine, r.prompt, r.params) for r in group]


def test_sequences_move_down_when_earlier_ones_end(
    toy: Toy, trusted: ToyReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves: list[tuple[int, int, int]] = []

    class Watched(FakeExecutor):
        def copy_prefix(self, source: int, target: int, length: int) -> None:
            if source != target:
                moves.append((source, target, length))
            super().copy_prefix(source, target, length)

    use(monkeypatch, executor=Watched)
    counts = (1, 9, 4, 9)
    done = Run(fresh(toy), [Requested([i] * (i + 1), greedy(count)) for i, count in enumerate(counts)])
    assert [tokens for tokens, _ in done.built] == [trusted.greedy([i] * (i + 1), n) for i, n in enumerate(counts)]
    most = 0 if fresh(toy).executor.capabilities.ragged else 3
    assert len(moves) <= most, "only what has to move, once"
    assert [r.live_rows for r in done.records if r.phase == "decode"][-3:] == [2, 2, 2]


def test_a_slot_that_frees_is_taken_at_once(toy: Toy, trusted: ToyReference) -> None:
    """Continuous batching: nobody waits for a batch to end."""
    counts = [3, 3, 3, 24, 3, 3, 3, 3]
    done = Run(fresh(toy), [Requested([i], greedy(count)) for i, count in enumerate(counts)])
    assert [tokens for tokens, _ in done.built] == [trusted.greedy([i], n) for i, n in enumerate(counts)]
    decode = [r for r in done.records if r.phase == "decode"]
    long = done.numbers[3]
    with_long = {n for r in decode if long in r.requests for n in r.requests}
    assert with_long == set(done.numbers), "the long one decoded beside every other"
    assert len(decode) <= 24


def test_running_sequences_wait_for_a_bounded_piece_of_prompt_only(toys: dict[str, Toy]) -> None:
    engine = fresh(toys["exact"], prefill_budget=8)
    engine.add(1, [1], engine.sampler([1], greedy(20)))
    assert engine.step() and engine.step()
    engine.add(2, list(range(30)), engine.sampler(list(range(30)), greedy(2)))
    between, gaps = 0, []
    while engine.has_work:
        outcome = engine.step()
        assert outcome is not None
        if outcome.record.phase == "decode":
            gaps.append(between)
            between = 0
        else:
            between += outcome.record.live_tokens
    assert max(gaps) == 8 and sum(gaps) == 30


def test_a_prompt_that_begins_like_another_copies_its_cache(toy: Toy, trusted: ToyReference) -> None:
    engine = fresh(toy, min_prefix=4)
    first, second = list(range(20)), [*range(12), 77, 78, 79]
    run(engine, [Requested(first, greedy(2))])
    done = Run(engine, [Requested(second, greedy(4))])
    assert done.built[0][0] == trusted.greedy(second, 4)
    assert sum(r.live_tokens for r in done.records if r.phase == "prompt") < len(second)
    without = Run(fresh(toy, min_prefix=0), [Requested(second, greedy(4))])
    assert without.built == done.built
    assert sum(r.live_tokens for r in without.records if r.phase == "prompt") == len(second)


def test_the_better_priority_goes_first(toy: Toy) -> None:
    engine = fresh(toy)
    for number, priority in enumerate([0, 0, 0, 0, 5, 1, -1]):
        engine.add(number, [number], engine.sampler([number], greedy(4)), priority=priority)
    admitted = []
    while engine.has_work:
        outcome = engine.step()
        assert outcome is not None
        admitted += [sequence for sequence, _ in outcome.admitted]
    assert admitted == [6, 0, 1, 2, 3, 5, 4]


def test_complete_continues_prompts_beside_others(engine: BatchedCore, trusted: ToyReference) -> None:
    prompts = [[1, 2], [3], list(range(20))]
    built = engine.complete(prompts, [greedy(n) for n in (3, 5, 1)])
    assert built == [trusted.greedy(p, n) for p, n in zip(prompts, (3, 5, 1), strict=True)]


# Step records


def test_records_name_bucket_and_padding(toys: dict[str, Toy]) -> None:
    done = Run(fresh(toys["static"]), [Requested([1, 2, 3], greedy(3)), Requested([4], greedy(2))])
    steps = [(r.phase, r.batch, r.query, r.context, r.live_rows, r.padding_tokens) for r in done.records]
    assert steps == [
        ("prompt", 4, 4, 0, 2, 12),
        ("decode", 2, 1, 16, 2, 0),
        ("decode", 1, 1, 8, 1, 0),
    ]
    assert [r.requests for r in done.records] == [(0, 1), (0, 1), (0,)]
    assert [r.bucket for r in done.records] == ["4x4+0", "2x1+16", "1x1+8"]
    assert all(r.schedule_s >= 0 and r.started_s > 0 and not r.miss for r in done.records)


def test_a_long_prompt_runs_in_chunks(toys: dict[str, Toy], trusted: ToyReference) -> None:
    engine = fresh(toys["static"])
    done = Run(engine, [Requested(list(range(30)), greedy(2))])
    assert done.built[0][0] == trusted.greedy(list(range(30)), 2)
    steps = [(r.phase, r.batch, r.query, r.context, r.padding_tokens) for r in done.records]
    assert steps == [("prompt", 1, 16, 0, 0), ("prompt", 1, 8, 24, 0), ("prompt", 1, 8, 24, 2), ("decode", 1, 1, 32, 0)]
    assert engine.steps == 4 and engine.stats.steps == 4


def test_a_compilation_while_serving_is_counted_and_reported(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    serving: list[bool] = []

    class Compiling(FakeExecutor):
        def run(self, step: Any) -> Any:
            if serving and step.phase == "decode":
                self.compilations.record("decode batch=1")
            return super().run(step)

    use(monkeypatch, executor=Compiling)
    engine = fresh(toy)
    run(engine, [Requested([1], greedy(2))])
    assert engine.stats.compilations == 0 and not caplog.records
    serving.append(True)
    records = Run(engine, [Requested([1], greedy(2))]).records
    assert [r.miss for r in records] == [False, True] and engine.stats.compilations == 1
    assert "unplanned compilation in step 3 (decode): decode batch=1" in caplog.text


def test_with_vllm_xla_check_recompilation_a_compilation_while_serving_is_an_error(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Compiling(FakeExecutor):
        def run(self, step: Any) -> Any:
            self.compilations.record("prompt batch=1")
            return super().run(step)

    use(monkeypatch, executor=Compiling)
    monkeypatch.setenv("VLLM_XLA_CHECK_RECOMPILATION", "1")
    with BundleLLM(toy.bundle) as llm, pytest.raises(DeviceError, match=r"prompt batch=1 was compiled while serving"):
        llm.generate([[1]], SamplingParams(max_tokens=1))
