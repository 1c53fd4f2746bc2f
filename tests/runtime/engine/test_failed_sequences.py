"""A sequence whose logits are no numbers, or whose constraint fails, ends alone; nothing of it harms another one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from llmc.compiler.verification.toy_reference import ToyReference
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.batched_core import BatchedCore
from llmc.runtime.engine.engine import LLMEngine
from llmc.runtime.engine.observer import Observer, RequestSummary
from llmc.runtime.engine.requests import Request, Update
from llmc.runtime.engine.sampling.constraints import GrammarConstraint
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.engine.speculation import SpeculativeConfig
from llmc.runtime.executors import open_executor
from llmc.testing.toy import VOCAB
from tests.damage import spoil
from tests.toy import Toy

BAD = 200
"""A token that no greedy text of the toy model below has."""


def greedy(max_tokens: int = 5, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **params)


def engine_of(toy: Toy, **options: Any) -> BatchedCore:
    bundle = Bundle.open(toy.bundle)
    return BatchedCore(bundle.plan, open_executor(bundle, 6), VOCAB, min_prefix=2, **options)


class Played:
    """Tokens and reason of each sequence, run together to their ends."""

    def __init__(self, engine: BatchedCore, *requested: tuple[Sequence[int], SamplingParams]) -> None:
        self.built: list[list[int]] = [[] for _ in requested]
        self.reasons: list[str | None] = [None] * len(requested)
        for number, (prompt, params) in enumerate(requested):
            engine.add(number, prompt, engine.sampler(prompt, params))
        while engine.has_work:
            outcome = engine.step()
            assert outcome is not None
            for token in outcome.tokens:
                assert self.reasons[token.sequence] is None, "nothing comes after the end"
                if token.token_id is not None:
                    self.built[token.sequence].append(token.token_id)
                self.reasons[token.sequence] = token.finish_reason
        occupancy = engine.scheduler.occupancy
        assert (occupancy.waiting, occupancy.prefilling, occupancy.decoding, occupancy.live_tokens) == (0, 0, 0, 0)


OTHERS = [[1, 2, 3], [9], list(range(100, 120))]


def check_others(played: Played, trusted: ToyReference, count: int = 5) -> None:
    assert played.built[1:] == [trusted.greedy(prompt, count) for prompt in OTHERS]
    assert played.reasons[1:] == ["length"] * 3


@pytest.mark.parametrize("params", [{}, {"logprobs": 3}, {"logit_bias": {5: 1.0}}, {"min_tokens": 2}], ids=str)
@pytest.mark.parametrize("prompt", [[BAD], [4, 5, BAD], [BAD, *range(20)], [*range(25), BAD, 7]], ids=len)
def test_in_its_prompt(
    toy: Toy, trusted: ToyReference, monkeypatch: pytest.MonkeyPatch, prompt: list[int], params: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    spoil(monkeypatch, BAD)
    engine = engine_of(toy)
    with caplog.at_level(logging.WARNING, "llmc"):
        played = Played(engine, (prompt, greedy(**params)), *((other, greedy()) for other in OTHERS))
    assert (played.built[0], played.reasons[0]) == ([], "error")
    check_others(played, trusted)
    assert "sequence 0 failed: the largest logit is nan: the compiled graph or its weights are damaged" in caplog.text
    assert Played(engine, ([1, 2], greedy())).built == [trusted.greedy([1, 2], 5)], "the engine goes on"


def test_a_chunk_of_its_prompt_that_fails_is_the_last(toys: dict[str, Toy], monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, BAD)
    engine = engine_of(toys["static"])
    prompt = [BAD, *range(30)]
    engine.add(0, prompt, engine.sampler(prompt, greedy()))
    outcome = engine.step()
    assert outcome is not None and outcome.record.live_tokens < len(prompt), "the first of several chunks"
    assert [(token.token_id, token.finish_reason) for token in outcome.tokens] == [(None, "error")]
    assert not engine.has_work


@pytest.mark.parametrize("params", [{}, {"logprobs": 0}], ids=str)
@pytest.mark.parametrize("index", range(4))
def test_while_it_decodes(
    toy: Toy, trusted: ToyReference, monkeypatch: pytest.MonkeyPatch, index: int, params: dict[str, Any]
) -> None:
    prompt = [7, 8]
    wanted = trusted.greedy(prompt, 6)
    assert wanted.index(wanted[index]) == index and not any(
        wanted[index] in [*other, *trusted.greedy(other, 5)] for other in OTHERS
    )
    spoil(monkeypatch, wanted[index])
    played = Played(engine_of(toy), (prompt, greedy(6, **params)), *((other, greedy()) for other in OTHERS))
    assert (played.built[0], played.reasons[0]) == (wanted[: index + 1], "error")
    check_others(played, trusted)


@pytest.mark.parametrize("sampling", [{"top_k": 3, "seed": 1}, {"top_p": 0.5, "seed": 1}, {"seed": 1}, {"min_p": 0.1}])
def test_however_it_draws(toy: Toy, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any]) -> None:
    spoil(monkeypatch, BAD)
    params = SamplingParams(max_tokens=4, **sampling)
    played = Played(engine_of(toy), ([4, BAD], params), ([4, 5], greedy()))
    assert (played.built[0], played.reasons) == ([], ["error", "length"])


@pytest.mark.parametrize("kind", ["exact", "ragged", "paged"])
def test_with_drafts(toys: dict[str, Toy], trusted: ToyReference, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """What held before is given, what was drafted behind it is not."""
    prompt = [0, 1] * 4
    wanted = trusted.greedy(prompt, 9)
    config = SpeculativeConfig(4, 3, 1)
    bias = {wanted[0]: 100.0, BAD: 90.0}  # the same token again and again, so that drafts hold
    alike = greedy(9, logit_bias=bias)
    plain = Played(engine_of(toys[kind]), (prompt, alike)).built[0]
    assert plain == [wanted[0]] * 9
    engine = engine_of(toys[kind], speculation=config)
    steps = engine.steps
    assert Played(engine, (prompt, alike)).built == [plain] and engine.steps - steps < 9
    spoil(monkeypatch, wanted[0])
    played = Played(engine_of(toys[kind], speculation=config), (prompt, alike), *((o, greedy()) for o in OTHERS))
    assert (played.built[0], played.reasons[0]) == (plain[:1], "error")
    check_others(played, trusted)


def test_nobody_finds_what_it_cached(toy: Toy, trusted: ToyReference, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harm was done once: who begins as the failed one did computes anew, and is well."""
    first = [*range(40, 52), BAD, 3]
    spoil(monkeypatch, BAD, times=1)
    engine = engine_of(toy)
    played = Played(engine, (first, greedy(3)))
    assert played.reasons == ["error"]
    for prompt in (first, [*first, 5], [*first[:-1], 6, 7]):
        again = Played(engine, (prompt, greedy(3)))
        assert (again.built[0], again.reasons) == (trusted.greedy(prompt, 3), ["length"])


def test_what_it_took_over_is_not_kept_either(toy: Toy, trusted: ToyReference) -> None:
    """A retained prefix that was spoiled in the cache fails one sequence, not each that finds it."""
    engine = engine_of(toy)
    prompt = list(range(40, 56))
    Played(engine, (prompt, greedy(3)))
    cache = engine.executor._cache  # type: ignore[attr-defined]
    cache[np.abs(cache).sum((1, 2)) > 0, 5] = np.nan
    assert Played(engine, ([*prompt, 1], greedy(3))).reasons == ["error"]
    again = Played(engine, ([*prompt, 1], greedy(3)))
    assert (again.built[0], again.reasons) == (trusted.greedy([*prompt, 1], 3), ["length"])


def test_retained_tokens_of_others_stay(toys: dict[str, Toy], monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, BAD)
    engine = engine_of(toys["ragged"])
    assert Played(engine, (list(range(40, 56)), greedy(2))).reasons == ["length"]
    kept = engine.scheduler.occupancy.retained_tokens
    Played(engine, ([BAD, 1, 2, 3], greedy(2)))
    assert engine.scheduler.occupancy.retained_tokens == kept


class Ended(Observer):
    def __init__(self) -> None:
        self.ended: list[RequestSummary] = []

    def finished(self, summary: RequestSummary) -> None:
        self.ended.append(summary)


def news_of(engine: LLMEngine, *requests: Request) -> list[Update]:
    for request in requests:
        engine.add(engine.prepare(request))
    news = []
    while engine.has_work:
        news += engine.step()
    return news


def test_one_of_n_choices(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, n=3, seed=5, ignore_eos=True)
    clean = news_of(LLMEngine(engine_of(toy)), Request("r", [4, 5, 6], params))
    texts = [[t for u in clean if u.index == i for t in u.token_ids] for i in range(3)]
    (bad,) = {texts[1][2]} - {t for i in (0, 2) for t in texts[i]}
    spoil(monkeypatch, bad)
    watcher = Ended()
    news = news_of(LLMEngine(engine_of(toy), observer=watcher), Request("r", [4, 5, 6], params))
    found = [[t for u in news if u.index == i for t in u.token_ids] for i in range(3)]
    assert found == [texts[0], texts[1][:3], texts[2]]
    assert [u.finish_reason for i in range(3) for u in news if u.index == i and u.finish_reason] == [
        "length", "error", "length",
    ]  # fmt: skip
    assert watcher.ended[0].finish_reasons == ("length", "error", "length")
    assert watcher.ended[0].output_tokens == 15


def test_the_best_of_some_is_not_one_that_failed(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=4, temperature=1.0, n=1, best_of=3, seed=5, ignore_eos=True)
    clean = news_of(LLMEngine(engine_of(toy)), Request("r", [4, 5, 6], params))
    best = [t for u in clean for t in u.token_ids]
    spoil(monkeypatch, best[0])
    news = news_of(LLMEngine(engine_of(toy)), Request("r", [4, 5, 6], params))
    assert [u.finish_reason for u in news if u.finish_reason] == ["length"]
    assert best[0] not in [t for u in news for t in u.token_ids]


class Failing(GrammarConstraint):
    """Fails at its `count`-th mask or token."""

    finished = False
    error = None

    def __init__(self, where: str, count: int) -> None:
        self._left = {where: count}

    def _count(self, where: str) -> None:
        left = self._left.get(where, 99) - 1
        self._left[where] = left
        if not left:
            raise RuntimeError("grammar without end")

    def copy(self) -> Failing:
        raise AssertionError("there is one sequence")

    def mask(self) -> Any:
        self._count("mask")
        return np.ones(VOCAB, np.bool_)

    def accept(self, token_id: int) -> None:
        self._count("accept")


@pytest.mark.parametrize(("where", "built"), [("mask", 1), ("accept", 2)])
def test_a_constraint_that_fails(
    toy: Toy, trusted: ToyReference, where: str, built: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(toy)
    prompt = [4, 5, 6]
    engine.add(9, prompt, engine.sampler(prompt, greedy(), constraint=Failing(where, 2)))
    found: list[tuple[int | None, str | None]] = []
    engine.add(8, [1, 2], engine.sampler([1, 2], greedy()))
    others = []
    with caplog.at_level(logging.WARNING, "llmc"):
        while engine.has_work:
            outcome = engine.step()
            assert outcome is not None
            found += [(t.token_id, t.finish_reason) for t in outcome.tokens if t.sequence == 9]
            others += [t.token_id for t in outcome.tokens if t.sequence == 8]
    assert [t for t, _ in found if t is not None] == trusted.greedy(prompt, 5)[:built]
    assert [reason for _, reason in found if reason] == ["error"]
    assert others == trusted.greedy([1, 2], 5)
    assert "sequence 9 failed: RuntimeError: grammar without end" in caplog.text
    assert engine.scheduler.occupancy.retained_slots == 2, "what it cached is as good as any"
