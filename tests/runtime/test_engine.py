"""The engine as a specification, over the fake executor: every token checked against the toy model's reference.

Both kinds of bundle run every test: one executable a bucket, and one for any shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.compiler.verification.toy_reference import ToyReference
from llmc.errors import InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.compilations import COMPILATIONS
from llmc.runtime.engine import Engine, Request
from llmc.runtime.executors.fake import FakeExecutor
from llmc.runtime.llm import BundleLLM
from llmc.runtime.sampling import SamplingParams
from tests.toy import EOS, VOCAB, Toy, reference

PROPERTY = settings(deadline=None, database=None, derandomize=True, max_examples=60)
LONGEST, LENGTH, SEQS = 31, 32, 4


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Toy]:
    static = Toy.make(tmp_path_factory.mktemp("toy"))
    static.compile()
    exact = Toy(static.model, static.store, static.bundle.with_name("exact"), static.plan)
    exact.compile(specialise=False)
    return {"static": static, "exact": exact}


@pytest.fixture(scope="module", params=["static", "exact"])
def toy(request: pytest.FixtureRequest, toys: dict[str, Toy]) -> Toy:
    return toys[request.param]


@pytest.fixture(scope="module")
def trusted(toys: dict[str, Toy]) -> ToyReference:
    return reference(toys["static"].model)


@pytest.fixture(scope="module")
def engine(toy: Toy) -> Iterator[Engine]:
    """One engine for the module: what earlier tests left in its cache must not matter either."""
    bundle = Bundle.open(toy.bundle)
    executor = bundle.executor()
    yield Engine(bundle.plan, executor, VOCAB, keep_records=True)
    executor.close()


@pytest.fixture(scope="module")
def llm(toy: Toy) -> Iterator[BundleLLM]:
    with BundleLLM(toy.bundle, keep_steps=True) as llm:
        yield llm


def greedy(max_tokens: int | None = 4, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **params)


def run(engine: Engine, requests: Sequence[Request]) -> list[tuple[list[int], str | None]]:
    """Tokens and reason of every request, after checking the order of events."""
    engine.records.clear()
    engine.steps = 0
    tokens: list[list[int]] = [[] for _ in requests]
    reasons: list[str | None] = [None] * len(requests)
    last = 0
    for event in engine.generate(requests):
        assert reasons[event.index] is None, "no token after the last one"
        assert last <= event.step < len(engine.records)
        last = event.step
        tokens[event.index].append(event.token_id)
        reasons[event.index] = event.finish_reason
    assert all(reasons)
    return list(zip(tokens, reasons, strict=True))


def one(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, ends: Sequence[int] = ()
) -> tuple[list[int], str | None]:
    return run(engine, [Request(prompt, params, ends)])[0]


# Limits


@pytest.mark.parametrize(("prompt", "message"), [
    ([], "the prompt is empty: it has no token"),
    ([1] * 32, r"the prompt has 32 tokens; this bundle takes at most 31 \(max_model_len 32, one token left to"),
    ([1, VOCAB, 2], f"prompt token ids must be in 0 … {VOCAB - 1}, found {VOCAB}"),
    ([1, -5, 2], f"prompt token ids must be in 0 … {VOCAB - 1}, found -5"),
])  # fmt: skip
def test_a_prompt_that_cannot_run_says_why_before_anything_runs(
    engine: Engine, prompt: list[int], message: str
) -> None:
    steps = engine.steps
    with pytest.raises(InputError, match=message) as caught:
        list(engine.generate([Request([1, 2], greedy()), Request(prompt, greedy())]))
    assert caught.value.exit_code == 2
    assert engine.steps == steps, "the good prompt of the group has not run either"


def test_ids_outside_the_vocabulary_in_parameters(engine: Engine) -> None:
    with pytest.raises(InputError, match=f"{VOCAB} is not below the vocabulary size {VOCAB}"):
        list(engine.generate([Request([1], greedy(stop_token_ids=[VOCAB]))]))


def test_no_requests_are_no_events(engine: Engine) -> None:
    assert list(engine.generate([])) == []


# Ends


@pytest.mark.parametrize("count", [1, 2, 9])
def test_max_tokens(engine: Engine, trusted: ToyReference, count: int) -> None:
    assert one(engine, [5, 6, 7], greedy(count)) == (trusted.greedy([5, 6, 7], count), "length")


@pytest.mark.parametrize("max_tokens", [None, 100])
@pytest.mark.parametrize("length", [1, 20, LONGEST])
def test_max_model_len(engine: Engine, trusted: ToyReference, length: int, max_tokens: int | None) -> None:
    prompt = list(range(length))
    assert one(engine, prompt, greedy(max_tokens)) == (trusted.greedy(prompt, LENGTH - length), "length")


@pytest.mark.parametrize("place", range(4))
def test_the_models_end_token_ends(engine: Engine, trusted: ToyReference, place: int) -> None:
    prompt = [9, 8, 7]
    tokens = trusted.greedy(prompt, 6)
    end = tokens[place]
    assert tokens.index(end) == place
    assert one(engine, prompt, greedy(6), [end]) == (tokens[: place + 1], "stop")
    assert one(engine, prompt, greedy(6), [VOCAB - 2, end]) == (tokens[: place + 1], "stop")
    assert one(engine, prompt, greedy(6, ignore_eos=True), [end]) == (tokens, "length")
    assert one(engine, prompt, greedy(place + 1), [end]) == (tokens[: place + 1], "stop"), "not length"


def test_stop_token_ids_end_whatever_ignore_eos_says(engine: Engine, trusted: ToyReference) -> None:
    tokens = trusted.greedy([9, 8, 7], 6)
    for ignore in (False, True):
        params = greedy(6, stop_token_ids=[tokens[2]], ignore_eos=ignore)
        assert one(engine, [9, 8, 7], params) == (tokens[:3], "stop")


def test_min_tokens_holds_end_tokens_back(engine: Engine, trusted: ToyReference) -> None:
    """An end token that would come too early is not chosen: the next best token is."""
    prompt = [9, 8, 7]
    end = trusted.greedy(prompt, 1)[0]
    tokens: list[int] = []
    while len(tokens) < 3:
        logits = trusted.logits([*prompt, *tokens], [len(prompt) + len(tokens) - 1])[0]
        logits[end] = -np.inf
        tokens.append(int(logits.argmax()))
    made, reason = one(engine, prompt, greedy(8, min_tokens=3), [end])
    assert made[:3] == tokens
    assert (reason == "stop") == (made[-1] == end)


def test_a_cancelled_request_ends_and_the_others_do_not_notice(engine: Engine, trusted: ToyReference) -> None:
    prompts = [[1, 2], [3], [4, 5, 6], [7]]
    made: dict[int, list[int]] = {i: [] for i in range(4)}
    for event in engine.generate([Request(p, greedy(8)) for p in prompts]):
        made[event.index].append(event.token_id)
        if (event.index, len(made[event.index])) in {(0, 3), (2, 1)}:
            engine.cancel(event.index)
    wanted = [trusted.greedy(p, n) for p, n in zip(prompts, (3, 8, 1, 8), strict=True)]
    assert [made[i] for i in range(4)] == wanted
    engine.cancel(99)  # unknown, or long finished: nothing happens


def test_an_abandoned_generation_leaves_the_engine_usable(engine: Engine, trusted: ToyReference) -> None:
    events = engine.generate([Request([1, 2, 3], greedy(8)), Request([4], greedy(8))])
    for _ in range(5):
        next(events)
    events.close()  # type: ignore[attr-defined]
    assert one(engine, [200, 3], greedy(6))[0] == trusted.greedy([200, 3], 6)


# Batches

prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=LONGEST)
asked = st.tuples(prompts, st.integers(1, 12), st.sampled_from([None, None, 0, 1, 3]))


@PROPERTY
@given(st.lists(asked, min_size=1, max_size=9))
def test_every_request_gets_what_it_gets_alone(
    engine: Engine, trusted: ToyReference, requests: list[tuple[list[int], int, int | None]]
) -> None:
    """Random lengths, more prompts than slots, ends at random times, so that sequences move between slots."""
    group, wanted = [], []
    for prompt, most, stop_at in requests:
        count = min(most, LENGTH - len(prompt))
        tokens = trusted.greedy(prompt, count)
        if stop_at is not None and stop_at < count:
            end = tokens[stop_at]
            group.append(Request(prompt, greedy(count), [end]))
            wanted.append((tokens[: tokens.index(end) + 1], "stop"))
        else:
            group.append(Request(prompt, greedy(count)))
            wanted.append((tokens, "length"))
    assert run(engine, group) == wanted
    assert [one(engine, r.prompt_token_ids, r.params, r.end_ids) for r in group] == wanted
    check_records(engine)


def check_records(engine: Engine) -> None:
    """Every step ran in the least bucket that covers it, its live rows in the first slots."""
    buckets = {(b.phase, b.batch, b.query, b.context) for b in engine.plan.buckets}
    for record in engine.records:
        assert record.live_rows == len(record.requests) == len(set(record.requests))
        assert min(record.prepare_s, record.execute_s, record.sample_s) >= 0
        if engine.executor.exact:
            assert record.padding_tokens == 0 and record.executable == "any"
            assert record.live_rows == record.batch
        else:
            assert (record.phase, record.batch, record.query, record.context) in buckets
            sizes = f"batch={record.batch} query={record.query} context={record.context}"
            assert record.executable == f"{record.phase} {sizes}"
        if record.phase == "decode":
            assert record.padding_tokens == record.batch - record.live_rows


def test_seeded_sampling_does_not_depend_on_the_batch(engine: Engine) -> None:
    params = [SamplingParams(max_tokens=7, temperature=1.0, top_p=0.9, seed=i) for i in range(6)]
    group = [Request([i, i + 1, 50], p) for i, p in enumerate(params)]
    assert run(engine, group) == [one(engine, r.prompt_token_ids, r.params) for r in group]


def test_sequences_move_down_when_earlier_ones_end(
    engine: Engine, trusted: ToyReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves: list[tuple[int, int, int]] = []
    copy = FakeExecutor.copy_prefix

    def watched(self: FakeExecutor, source: int, target: int, length: int) -> None:
        moves.append((source, target, length))
        copy(self, source, target, length)

    monkeypatch.setattr(FakeExecutor, "copy_prefix", watched)
    group = [Request([i] * (i + 1), greedy(count)) for i, count in enumerate((1, 6, 2, 6))]
    made = run(engine, group)
    assert [tokens for tokens, _ in made] == [trusted.greedy([i] * (i + 1), n) for i, n in enumerate((1, 6, 2, 6))]
    assert moves == [(3, 0, 4)], "request 3 to the slot of 0; request 2 was last when it ended"
    assert [r.live_rows for r in engine.records if r.phase == "decode"] == [3, 2, 2, 2, 2]


def test_more_requests_than_slots_run_in_groups(engine: Engine) -> None:
    run(engine, [Request([i], greedy(3)) for i in range(10)])
    groups = [r.requests for r in engine.records if r.phase == "decode"]
    assert {len(g) for g in groups} == {4, 2}
    assert sorted({i for g in groups for i in g}) == list(range(10))


# Step records


def test_records_name_bucket_and_padding(toys: dict[str, Toy]) -> None:
    bundle = Bundle.open(toys["static"].bundle)
    engine = Engine(bundle.plan, bundle.executor(), VOCAB, keep_records=True)
    run(engine, [Request([1, 2, 3], greedy(3)), Request([4], greedy(2))])
    steps = [(r.phase, r.batch, r.query, r.context, r.live_rows, r.padding_tokens, r.requests) for r in engine.records]
    assert steps == [
        ("prompt", 4, 4, 0, 2, 12, (0, 1)),
        ("decode", 2, 1, 16, 2, 0, (0, 1)),
        ("decode", 1, 1, 8, 1, 0, (0,)),
    ]


def test_a_long_prompt_runs_in_chunks(toys: dict[str, Toy], trusted: ToyReference) -> None:
    bundle = Bundle.open(toys["static"].bundle)
    engine = Engine(bundle.plan, bundle.executor(), VOCAB, keep_records=True)
    assert one(engine, list(range(30)), greedy(2))[0] == trusted.greedy(list(range(30)), 2)
    steps = [(r.phase, r.batch, r.query, r.context, r.padding_tokens) for r in engine.records]
    assert steps == [("prompt", 1, 16, 0, 0), ("prompt", 1, 8, 24, 0), ("prompt", 1, 8, 24, 2), ("decode", 1, 1, 32, 0)]
    assert engine.steps == 4


def test_records_are_kept_only_when_asked_for(toy: Toy) -> None:
    bundle = Bundle.open(toy.bundle)
    engine = Engine(bundle.plan, bundle.executor(), VOCAB)
    list(engine.generate([Request([1], greedy(3))]))
    assert engine.records == [] and engine.steps == 3


def test_an_output_has_every_step_it_took_part_in(llm: BundleLLM) -> None:
    long, short = llm.generate([list(range(30)), [7]], greedy(2))
    assert [s.phase for s in long.steps].count("prompt") >= (1 if llm.executor.exact else 3)
    assert [s.phase for s in short.steps] == ["prompt", "decode"]
    assert all(0 in s.requests for s in long.steps) and all(1 in s.requests for s in short.steps)


def test_nothing_is_ever_compiled(llm: BundleLLM) -> None:
    before = COMPILATIONS.count
    llm.generate([[i] * n for i, n in enumerate((1, 5, 9, 17, 31))], greedy(12))
    assert llm.compilations == 0 and COMPILATIONS.count == before


# Text


@pytest.mark.parametrize("seed", range(4))
def test_streamed_text_joined_is_the_text(llm: BundleLLM, seed: int) -> None:
    asked = ["Grüße aus", "日本語 😀", "plain", "a", "x y z"]
    params = SamplingParams(max_tokens=12, temperature=3.0, seed=seed)
    streamed = [""] * len(asked)
    finished: dict[int, Any] = {}
    for index, text, event, output in llm.stream(asked, params):
        assert index not in finished and event is not None
        streamed[index] += text
        if output:
            finished[index] = output
    whole = llm.generate(asked, params)
    for i, output in enumerate(whole):
        completion = output.outputs[0]
        assert streamed[i] == completion.text == finished[i].outputs[0].text
        assert completion.text == llm.bundle.tokenizer.decode(completion.token_ids)
        assert completion.token_ids == finished[i].outputs[0].token_ids
        assert output.prompt == asked[i]
        assert 0 < output.timings.first_token_s <= output.timings.total_s


def forced(llm: BundleLLM, text: str) -> dict[str, Any]:
    """Parameters under which the model writes `text` over and over: its bytes, biased upwards, and nothing else."""
    ids = set(llm.bundle.tokenizer.encode(text))
    return {"logit_bias": dict.fromkeys(ids, 100.0), "temperature": 0}


def test_a_stop_string_cuts_the_text_and_frees_the_slot(llm: BundleLLM) -> None:
    params = SamplingParams(max_tokens=10, stop="xx", **forced(llm, "x"))
    free = SamplingParams(max_tokens=10, **forced(llm, "y"))
    stopped, other = llm.generate(["one", "two"], [params, free])
    assert (stopped.outputs[0].text, stopped.outputs[0].finish_reason) == ("", "stop")
    assert len(stopped.outputs[0].token_ids) == 2
    assert (other.outputs[0].text, other.outputs[0].finish_reason) == ("y" * 10, "length")
    assert {s.live_rows for s in other.steps if s.phase == "decode"} == {1, 2}
    assert "".join(text for _, text, _, _ in llm.stream(["one"], params)) == ""


def test_a_stop_string_that_never_completes_is_shown(llm: BundleLLM) -> None:
    params = SamplingParams(max_tokens=3, stop=["xxxx", "z"], **forced(llm, "x"))
    (output,) = llm.generate("one", params)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("xxx", "length")


def test_the_end_token_ends_text_and_is_not_in_it(llm: BundleLLM) -> None:
    params = SamplingParams(max_tokens=5, temperature=0, logit_bias={EOS: 100.0})
    (output,) = llm.generate("one", params)
    assert (output.outputs[0].text, output.outputs[0].token_ids, output.outputs[0].finish_reason) == ("", [EOS], "stop")
    (longer,) = llm.generate("one", SamplingParams(max_tokens=5, min_tokens=2, temperature=0, logit_bias={EOS: 100.0}))
    assert len(longer.outputs[0].token_ids) == 3 and longer.outputs[0].token_ids[-1] == EOS
    ignoring = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0, logit_bias={EOS: 100.0})
    assert llm.generate("one", ignoring)[0].outputs[0].token_ids == [EOS] * 5


def test_prompts_in_every_form(llm: BundleLLM) -> None:
    ids = llm.bundle.tokenizer.encode("hi")
    forms: list[Any] = ["hi", ids, {"prompt": "hi"}, {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, greedy(4))
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    assert [o.prompt_token_ids for o in outputs] == [ids] * 4
    assert llm.generate(ids, greedy(4))[0].outputs == outputs[0].outputs
    assert llm.generate([], greedy(4)) == []
    messages = [{"role": "user", "content": "hi"}]
    (answer,) = llm.chat(messages, greedy(4))
    assert answer.prompt_token_ids == llm.bundle.tokenizer.encode("user: hi\nassistant:", add_special_tokens=False)
    assert llm.chat([messages, messages], greedy(4))[1].outputs == answer.outputs
    with pytest.raises(InputError, match="a prompt object needs 'prompt', 'prompt_token_ids' or 'messages'"):
        llm.generate({"text": "hi"})
    with pytest.raises(InputError, match="1 sampling parameters for 2 prompts"):
        llm.generate(["a", "b"], [greedy()])
    with pytest.raises(InputError, match="the prompt is empty"):
        llm.generate("")


def test_a_text_over_the_limit_names_the_limit(llm: BundleLLM) -> None:
    with pytest.raises(InputError, match="the prompt has 40 tokens; this bundle takes at most 31"):
        llm.generate("x" * 40)
