"""Random requests through the engine: many at once or few, some cancelled, and what they ran in."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmc.errors import VerificationError
from llmc.runtime.engine.observer import Observer, StepRecord

if TYPE_CHECKING:
    from llmc.runtime.certificate.requests import RandomRequest
    from llmc.runtime.engine.engine import LLMEngine
    from llmc.runtime.engine.requests import Update

Bucket = tuple[str, int, int, int]
"""Phase, batch, query, context."""


class StepCounter(Observer):
    """Counts the steps that ran, by bucket and by executable, while it `counts`."""

    def __init__(self) -> None:
        self.counts = False
        self.buckets: Counter[Bucket] = Counter()
        self.executables: Counter[str] = Counter()
        self.prefixes = 0

    def stepped(self, record: StepRecord) -> None:
        """A step ran."""
        if self.counts:
            self.buckets[record.phase, record.batch, record.query, record.context] += 1
            self.executables[record.executable] += 1

    def admitted(self, request_id: str, queue_s: float, cached_tokens: int) -> None:
        """A request's prompt may begin in the cache."""
        if self.counts:
            self.prefixes += cached_tokens > 0


@dataclass
class Driven:
    """What became of requests: how many by reason of their choices' ends, of each kind, tokens of prompts and answers,
    the longest prompt; and the answers of some that can be repeated, in the order of their choices."""

    requests: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    longest_prompt: int = 0
    tokens: int = 0
    most_at_once: int = 0
    answers: list[tuple[RandomRequest, list[int]]] = field(default_factory=list)


@dataclass
class _Open:
    random: RandomRequest
    kept: bool
    choices: int
    tokens: int = 0
    answer: list[int] = field(default_factory=list)


def drive(
    engine: LLMEngine, requests: Iterable[RandomRequest], most: int, seed: int, keep: int,
    tell: Callable[[int], None] = lambda _: None,
) -> Driven:  # fmt: skip
    """Run `requests`, up to `most` at once; `tell` hears how many have ended. Of every `keep`th that can be repeated
    the answer is kept.

    Raises VerificationError where a request ends with an error, and whatever the executor raises.
    """
    draw = random.Random(seed)  # noqa: S311
    driven, waiting, open_ = Driven(), iter(requests), dict[str, _Open]()
    wanted, more, repeatable = 1, True, 0
    while more or engine.has_work:
        while more and len(open_) < wanted:
            one = next(waiting, None)
            if one is None:
                more = False
                break
            kept = one.repeatable and repeatable % keep == 0
            repeatable += one.repeatable
            _begin(engine, one, kept, open_, driven)
        driven.most_at_once = max(driven.most_at_once, len(open_))
        for update in engine.step():
            _take(engine, update, open_, driven)
        if draw.random() < 0.1:
            wanted = draw.randint(1, most)
        tell(driven.requests - len(open_))
    return driven


def _begin(engine: LLMEngine, one: RandomRequest, kept: bool, open_: dict[str, _Open], driven: Driven) -> None:
    request = one.request
    engine.add(engine.prepare(request))
    open_[request.request_id] = _Open(one, kept, request.params.n)
    driven.requests += 1
    driven.kinds[one.kind] += 1
    driven.prompt_tokens += len(request.prompt_token_ids)
    driven.longest_prompt = max(driven.longest_prompt, len(request.prompt_token_ids))
    if one.cancel_after == 0:
        _cancel(engine, request.request_id, open_, driven)


def _take(engine: LLMEngine, update: Update, open_: dict[str, _Open], driven: Driven) -> None:
    state = open_.get(update.request_id)
    if state is None:
        return  # cancelled by another update of the same step
    driven.tokens += len(update.token_ids)
    state.tokens += len(update.token_ids)
    if state.kept:
        state.answer += update.token_ids
    if update.finish_reason is not None:
        _end(update, open_, driven)
    elif state.random.cancel_after is not None and state.tokens >= state.random.cancel_after:
        _cancel(engine, update.request_id, open_, driven)


def _cancel(engine: LLMEngine, request_id: str, open_: dict[str, _Open], driven: Driven) -> None:
    for update in engine.cancel(request_id):
        if update.finish_reason is not None:
            _end(update, open_, driven)
    open_.pop(request_id, None)


def _end(update: Update, open_: dict[str, _Open], driven: Driven) -> None:
    """A choice has ended."""
    state = open_[update.request_id]
    reason = update.finish_reason or "error"
    if reason == "error":
        raise VerificationError(
            f"request {update.request_id} ({state.random.kind}, {len(state.random.request.prompt_token_ids)} tokens) "
            "ended with an error; the log says why"
        )
    driven.finished[reason] += 1
    state.choices -= 1
    if state.choices == 0:
        del open_[update.request_id]
        if state.kept:
            driven.answers.append((state.random, state.answer))
