"""The promise of speculation: fewer steps, and the very same tokens, whatever chooses them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.compiler.verification.toy_reference import ToyReference
from llmc.errors import InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.batched_core import BatchedCore, TokenEvent
from llmc.runtime.engine.engine import LLMEngine
from llmc.runtime.engine.observer import Observer, RequestSummary, StepRecord
from llmc.runtime.engine.requests import Request
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.engine.speculation import SpeculativeConfig
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.fake.executor import FakeExecutor
from llmc.runtime.llm import BundleLLM
from llmc.testing.toy import VOCAB
from tests.devices import noting, use
from tests.tiers import examples
from tests.toy import Toy

PROPERTY = examples(60, database=None, derandomize=True)
KINDS = ("exact", "ragged", "paged")
DRAFTS = SpeculativeConfig(4, 3, 1)


@pytest.fixture(params=KINDS)
def toy(toys: dict[str, Toy], request: pytest.FixtureRequest) -> Toy:
    return toys[request.param]


def engine_of(toy: Toy, speculation: SpeculativeConfig | None = DRAFTS, **options: Any) -> BatchedCore:
    bundle = Bundle.open(toy.bundle)
    return BatchedCore(bundle.plan, open_executor(bundle, 6), VOCAB, speculation=speculation, **options)


class Run:
    """Everything that a set of requests gave, to be equal with and without drafts."""

    def __init__(
        self, engine: BatchedCore, requested: Sequence[tuple[Sequence[int], SamplingParams]], ends: Sequence[int] = ()
    ) -> None:
        self.records: list[StepRecord] = []
        self.events: dict[int, list[TokenEvent]] = {}
        for number, (prompt, params) in enumerate(requested):
            engine.add(number, prompt, engine.sampler(prompt, params, ends))
        while engine.has_work:
            outcome = engine.step()
            assert outcome is not None
            self.records.append(outcome.record)
            for token in outcome.tokens:
                self.events.setdefault(token.sequence, []).append(token)
        assert engine.step() is None
        assert engine.scheduler.occupancy.live_tokens == 0

    @property
    def drafted(self) -> int:
        return sum(r.drafted for r in self.records)

    @property
    def accepted(self) -> int:
        return sum(r.accepted for r in self.records)

    def tokens(self, number: int = 0) -> list[int]:
        return [event.token_id for event in self.events[number]]


def without_rounding(run: Run) -> list[Any]:
    """Events, with log probabilities to the digits that do not depend on how sums are ordered."""
    return [
        (
            e.sequence, e.token_id, e.finish_reason, e.ends,
            e.logprobs and (e.logprobs.token_id, round(e.logprobs.logprob, 3), e.logprobs.rank),
        )
        for _, events in sorted(run.events.items())
        for e in events
    ]  # fmt: skip


few = st.lists(st.integers(0, 3), min_size=1, max_size=24)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 20),
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
    seed=st.integers(0, 3),
    allowed_token_ids=st.sampled_from([None, [0, 1], [0, 1, 2, 3]]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    logit_bias=st.sampled_from([None, None, {1: 3.0}]),
    min_tokens=st.sampled_from([0, 0, 1]),
    stop_token_ids=st.sampled_from([None, [2]]),
    logprobs=st.sampled_from([None, None, 2]),
    top_k=st.sampled_from([0, 5]),
)


@PROPERTY
@given(st.sampled_from(KINDS), st.lists(st.tuples(few, params), min_size=1, max_size=6), st.integers(1, 6))
def test_drafts_change_no_token_and_no_end(
    toys: dict[str, Toy], kind: str, requested: list[tuple[list[int], SamplingParams]], most: int
) -> None:
    """Greedy and seeded sampling, penalties, biases, masks, stop ids, log probabilities; alone and in batches."""
    with_drafts = Run(engine_of(toys[kind], SpeculativeConfig(most, 3, 1)), requested, [3])
    without = Run(engine_of(toys[kind], None), requested, [3])
    assert [e.finish_reason for e in with_drafts.events[0]] == [e.finish_reason for e in without.events[0]]
    assert without_rounding(with_drafts) == without_rounding(without)
    assert without.drafted == 0
    assert with_drafts.accepted <= with_drafts.drafted


def repeating(count: int = 20, **more: Any) -> SamplingParams:
    """Of two tokens, so that what was there comes again."""
    return SamplingParams(max_tokens=count, temperature=0, allowed_token_ids=[0, 1], **more)


def test_what_repeats_takes_fewer_steps(toy: Toy) -> None:
    fast, slow = Run(engine_of(toy), [([0, 1], repeating())]), Run(engine_of(toy, None), [([0, 1], repeating())])
    assert fast.tokens() == slow.tokens()
    assert len(slow.records) == 20
    assert len(fast.records) == 20 - fast.accepted < 15
    assert [r.drafts for r in fast.records if r.drafted] == [1] * sum(r.drafted > 0 for r in fast.records)
    assert all(r.live_tokens == 1 + r.drafted for r in fast.records[1:])


def test_greedy_text_is_the_references(toy: Toy, trusted: ToyReference) -> None:
    for seed in range(8):
        prompt = np.random.default_rng(seed).integers(0, 4, 9).tolist() * 2
        built = Run(engine_of(toy), [(prompt, SamplingParams(max_tokens=12, temperature=0))])
        assert built.tokens() == trusted.greedy(prompt, 12)


def test_rows_of_several_tokens_run_alone_where_rows_cannot_differ(toys: dict[str, Toy]) -> None:
    requested = [([0, 1], repeating(24)), ([1, 0, 0], repeating(6))]
    exact = Run(engine_of(toys["exact"]), requested)
    assert {r.live_rows for r in exact.records if r.drafted} == {1}
    ragged = Run(engine_of(toys["ragged"]), requested)
    assert 2 in {r.live_rows for r in ragged.records if r.drafted}


@pytest.mark.parametrize("count", range(1, 8))
def test_no_step_goes_beyond_max_tokens(toy: Toy, count: int) -> None:
    built = Run(engine_of(toy, SpeculativeConfig(6, 2, 1)), [([0, 1] * 6, repeating(count))])
    assert len(built.tokens()) == count
    assert all(r.live_tokens <= count for r in built.records[1:])


def test_no_step_goes_beyond_max_model_len(toy: Toy) -> None:
    built = Run(engine_of(toy), [([0, 1] * 12, repeating(100))])
    assert len(built.tokens()) == 32 - 24
    assert built.events[0][-1].finish_reason == "length"


def test_an_end_token_among_drafts_that_hold_is_the_last(toy: Toy) -> None:
    """The draft goes on after the end token, as the prompt does."""
    params = SamplingParams(max_tokens=16, temperature=0, min_tokens=4, logit_bias={5: 50.0, 6: 100.0})
    built = Run(engine_of(toy, SpeculativeConfig(32, 4, 1)), [([5, 5, 5, 5, 6, 9, 9, 9], params)], [6])
    assert built.tokens() == [5, 5, 5, 5, 6]
    assert built.events[0][-1].finish_reason == "stop" and built.events[0][-1].ends
    assert (built.records[-1].drafted, built.records[-1].accepted) == (4, 1)


class Watcher(Observer):
    def __init__(self) -> None:
        self.tokens = 0
        self.ended: list[RequestSummary] = []

    def emitted(self, first_token_s: Sequence[float], inter_token_s: Sequence[float]) -> None:
        assert min([*first_token_s, *inter_token_s]) >= 0
        self.tokens += len(first_token_s) + len(inter_token_s)

    def finished(self, summary: RequestSummary) -> None:
        self.ended.append(summary)


def test_a_stop_string_in_the_middle_of_a_steps_tokens_drops_the_rest(toy: Toy) -> None:
    bundle = Bundle.open(toy.bundle)

    def params_of(stop: str | None) -> SamplingParams:
        return SamplingParams(max_tokens=20, temperature=0, allowed_token_ids=[7, 8], stop=stop)

    def generated(speculation: SpeculativeConfig | None, stop: str | None) -> tuple[str, Watcher, int]:
        watcher, text = Watcher(), ""
        core = engine_of(toy, speculation)
        engine = LLMEngine(core, bundle.tokenizer, observer=watcher)
        engine.add(engine.prepare(Request("a", [7, 8], params_of(stop))))
        while engine.has_work:
            text += "".join(update.text for update in engine.step())
        assert core.step() is None
        return text, watcher, core.steps

    whole, _, _ = generated(None, None)
    cut = 0
    for end in range(4, len(whole)):
        stop = whole[2:end]
        wanted, plain, steps = generated(None, stop)
        text, watcher, fewer = generated(DRAFTS, stop)
        assert (text, watcher.tokens) == (wanted, plain.tokens)
        assert (watcher.ended[0].output_tokens, watcher.ended[0].finish_reasons) == (
            plain.ended[0].output_tokens, plain.ended[0].finish_reasons,
        )  # fmt: skip
        cut += fewer < steps
    assert cut, "some texts came in fewer steps"


def test_the_cache_is_as_without_drafts_for_those_who_come_after(toy: Toy, trusted: ToyReference) -> None:
    """A prompt that begins with what was drafted in vain must not find it in a slot."""
    engine = engine_of(toy, min_prefix=1)
    first = Run(engine, [([0, 1], repeating(9))]).tokens()
    for length in range(1, 10):
        prompt = [0, 1, *first[:length], 5]
        assert Run(engine, [(prompt, SamplingParams(max_tokens=3, temperature=0))]).tokens() == trusted.greedy(
            prompt, 3
        )


def test_logits_that_are_no_numbers_end_a_sequence_as_without_drafts(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(FakeExecutor):
        def run_each(self, step: Any) -> Any:
            return super().run_each(step) * math.nan

    use(monkeypatch, executor=Lost)
    engine = engine_of(toy)
    run = Run(engine, [([0, 1] * 4, repeating(9))])
    assert [(e.token_id, e.finish_reason) for e in run.events[0]][-1] == (None, "error")
    assert len(run.events[0]) == 2 and not engine.has_work


def test_guesses_that_never_hold_are_soon_built_seldom(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.runtime.engine.speculation.NgramIndex.lookup", lambda self, tokens, most: [9][:most])
    built = Run(engine_of(toy, SpeculativeConfig(1)), [([0, 1], repeating(24))])
    assert [number for number, r in enumerate(built.records[1:]) if r.drafted] == [0, 3, 8, 17]
    assert (built.drafted, built.accepted) == (4, 0)


def test_graphs_of_fixed_shapes_are_refused_with_what_to_compile(
    toys: dict[str, Toy], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    use(monkeypatch, executor=noting(lambda name, of: closed.append(of) if name == "close" else None))
    said = "its graphs have fixed shapes, .*: leave speculation out, or compile without --specialise"
    with pytest.raises(InputError, match=said) as caught:
        BundleLLM(toys["static"].bundle, speculative_config={"num_speculative_tokens": 2})
    assert caught.value.exit_code == 2 and str(toys["static"].bundle) in str(caught.value)
    assert len(closed) == 1


def test_graphs_that_give_the_last_logits_only_are_refused(
    toys: dict[str, Toy], monkeypatch: pytest.MonkeyPatch
) -> None:
    class LastOnly(FakeExecutor):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.capabilities = replace(self.capabilities, scores_each=False)

    use(monkeypatch, executor=LastOnly)
    with pytest.raises(InputError, match=r"logits after the last token of a row only, .* compile again, for device"):
        engine_of(toys["exact"])


def test_an_llm_takes_vllms_argument_and_counts_drafts(toys: dict[str, Toy]) -> None:
    given = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with BundleLLM(toys["ragged"].bundle, keep_steps=True, speculative_config=given) as llm:
        outputs = llm.generate([[0, 1], [1, 0]], repeating(20))
    with BundleLLM(toys["ragged"].bundle) as plain:
        wanted = plain.generate([[0, 1], [1, 0]], repeating(20))
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in wanted]
    assert sum(step.accepted for step in outputs[0].steps) > 3
