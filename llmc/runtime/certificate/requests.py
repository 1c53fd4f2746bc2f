"""Generate random requests within a bundle's limits and run them through the engine.

They cover every sampling kind and both ends of each range; few or many run at once, and some are cancelled. The same
seed gives the same requests and, because each sampler draw is seeded, the same answers.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from llmc.buckets.capture.auxiliary import SAMPLING
from llmc.errors import InputError, VerificationError
from llmc.runtime.engine.observer import Observer, StepRecord
from llmc.runtime.engine.requests import Request
from llmc.runtime.engine.sampling.params import StructuredOutputsParams
from llmc.runtime.startup.auxiliary import sampling_params

if TYPE_CHECKING:
    from llmc.buckets.plan import Plan
    from llmc.runtime.engine.engine import LLMEngine
    from llmc.runtime.engine.requests import Update
    from llmc.runtime.engine.sampling.params import SamplingParams
    from llmc.runtime.executors.base import Executor

SHORT_ANSWER = 12
"""Maximum tokens of most answers."""
LONG_ANSWER = 1024
"""Tokens of the longest answers."""
REMEMBERED = 4
"""Number of recent prompts that later ones may share a prefix with; slots keep no older ones."""
STRUCTURED = "structured output"
FORMS: tuple[Mapping[str, Any], ...] = (
    {"regex": "[a-z]+"}, {"choice": ("yes", "no")}, {"json_object": True}, {"regex": "a"},
)  # fmt: skip

# shares of all requests
_AT_EDGE, _UNIFORM, _SHARED, _CANCELLED, _SEVERAL, _STRUCTURED = 0.2, 0.15, 0.25, 0.08, 0.05, 0.02


@dataclass(frozen=True)
class RandomRequest:
    """A request of one kind of SAMPLING; it is cancelled after `cancel_after` tokens, None: never."""

    request: Request
    kind: str
    cancel_after: int | None = None


class RandomRequests:
    """Generates requests of `kinds` that `plan` and the executor's cache admit, with token ids below `vocab_size`."""

    def __init__(
        self, plan: Plan, executor: Executor, vocab_size: int, kinds: Mapping[str, SamplingParams], seed: int,
        end_ids: tuple[int, ...] = (), offers: Callable[[str], bool] = lambda _: True,
    ) -> None:  # fmt: skip
        """`offers`: whether the engine supports the sampling parameter of that name."""
        if not kinds:
            raise InputError("the bundle accepts no kind of sampling")
        self._random = random.Random(seed)  # noqa: S311 - repeatable on purpose
        self._kinds = kinds
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._offers = offers
        cache = executor.capabilities.cache_tokens
        room = plan.limits.max_model_len
        if cache is not None:
            room = min(room, cache // executor.capabilities.block_tokens * executor.capabilities.block_tokens + 1)
        self._room = room
        self.longest = min(plan.limits.longest_prompt, room - 1)
        sizes = {size for b in plan.prompt for size in (b.query, b.context, b.context + b.query)}
        edges = {edge for size in sizes for edge in (size - 1, size, size + 1)} | {1, 2, self.longest - 1, self.longest}
        self._edges = sorted(edge for edge in edges if 1 <= edge <= self.longest)
        self._earlier: deque[tuple[int, ...]] = deque(maxlen=REMEMBERED)

    def take(self, count: int) -> Iterator[RandomRequest]:
        """Yield `count` requests, starting with the shortest and longest prompts and answers and each kind."""
        first = self._first()
        for number in range(count):
            built = next(first, None) or self._any(self._kind())
            yield replace(built, request=replace(built.request, request_id=f"certify-{number}"))

    def _first(self) -> Iterator[RandomRequest]:
        yield self._built("greedy", self._tokens(self.longest), LONG_ANSWER)
        yield self._built("greedy", self._tokens(1), 1)
        yield self._built("greedy", self._tokens(self.longest), 1)
        yield replace(self._built("greedy", self._tokens(self.longest), 2), cancel_after=0)
        for kind in self._kinds:
            yield self._any(kind)

    def _kind(self) -> str:
        kinds = [kind for kind in self._kinds if kind != STRUCTURED]
        if STRUCTURED in self._kinds and (not kinds or self._random.random() < _STRUCTURED):
            return STRUCTURED
        return self._random.choice(kinds)

    def _any(self, kind: str) -> RandomRequest:
        draw = self._random
        built = self._built(kind, self._prompt(), min(draw.randint(1, SHORT_ANSWER), draw.randint(1, SHORT_ANSWER)))
        if draw.random() < _CANCELLED:
            built = replace(built, cancel_after=draw.randrange(built.request.params.max_tokens or 1))
        return built

    def _built(self, kind: str, prompt: tuple[int, ...], answer: int) -> RandomRequest:
        """Build a request; an unknown `kind` stands for a random one."""
        draw = self._random
        kind = kind if kind in self._kinds else next(iter(self._kinds))
        params = self._kinds[kind]
        changed: dict[str, Any] = {"max_tokens": max(params.min_tokens, min(answer, self._room - len(prompt)), 1)}
        if not params.greedy:
            changed["seed"] = draw.randrange(1 << 32)
            if draw.random() < _SEVERAL:
                changed |= {"n": 2, "best_of": draw.choice((None, 3))}
        if answer > SHORT_ANSWER or draw.random() < 0.5:
            changed["ignore_eos"] = True
        if kind == STRUCTURED:
            changed["structured_outputs"] = StructuredOutputsParams(**draw.choice(FORMS))
        self._earlier.append(prompt)
        changed = {name: value for name, value in changed.items() if self._offers(name)}
        request = Request("", prompt, replace(params, **changed), self._end_ids, draw.randint(-2, 2))
        return RandomRequest(request, kind)

    def _prompt(self) -> tuple[int, ...]:
        """Return a prompt of random length; some extend a prefix of an earlier prompt."""
        draw = self._random
        if self._earlier and draw.random() < _SHARED:
            earlier = draw.choice(self._earlier)
            begins = earlier[: draw.randint(1, len(earlier))]
            return (begins + self._tokens(draw.randint(1, SHORT_ANSWER)))[: self.longest]
        return self._tokens(self._length())

    def _length(self) -> int:
        """Return a bucket boundary or a random length, shorter ones more often."""
        draw = self._random
        sort = draw.random()
        if sort < _AT_EDGE:
            return draw.choice(self._edges)
        if sort < _AT_EDGE + _UNIFORM:
            return draw.randint(1, self.longest)
        return max(1, min(self.longest, round(math.exp(draw.uniform(0.0, math.log(self.longest))))))

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.choices(range(self._vocab_size), k=count))


def admitted_kinds(engine: LLMEngine) -> tuple[dict[str, SamplingParams], dict[str, str]]:
    """Return the kinds of SAMPLING that this engine accepts, and the reason for each refused kind."""
    kinds: dict[str, SamplingParams] = {}
    refused: dict[str, str] = {}
    for kind in SAMPLING:
        try:
            params = sampling_params(kind, has_text=engine.tokenizer is not None)
            engine.prepare(Request("kinds", [0], params))
        except InputError as error:
            refused[kind] = str(error)
        else:
            kinds[kind] = params
    return kinds, refused


Bucket = tuple[str, int, int, int]
"""Phase, batch, query, context."""


class StepCounter(Observer):
    """Counts steps by bucket and by executable while `counts` is true."""

    def __init__(self) -> None:
        self.counts = False
        self.buckets: Counter[Bucket] = Counter()
        self.executables: Counter[str] = Counter()
        self.prefixes = 0

    def stepped(self, record: StepRecord) -> None:
        """Count the step."""
        if self.counts:
            self.buckets[record.phase, record.batch, record.query, record.context] += 1
            self.executables[record.executable] += 1

    def admitted(self, request_id: str, queue_s: float, cached_tokens: int) -> None:
        """Record how much of the prompt came from the cache."""
        if self.counts:
            self.prefixes += cached_tokens > 0


@dataclass
class Driven:
    """Results of the requests: counts by finish reason and by kind, prompt and answer tokens, longest prompt."""

    requests: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    longest_prompt: int = 0
    tokens: int = 0
    most_at_once: int = 0


@dataclass
class _Open:
    random: RandomRequest
    choices: int
    tokens: int = 0


def drive(
    engine: LLMEngine, requests: Iterable[RandomRequest], most: int, seed: int,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Driven:  # fmt: skip
    """Run `requests`, at most `most` at once; `on_progress` is called with the number that have ended.

    Raises VerificationError if a request ends with an error, and any error of the executor.
    """
    draw = random.Random(seed)  # noqa: S311
    driven, waiting, open_ = Driven(), iter(requests), dict[str, _Open]()
    wanted, more = 1, True
    while more or engine.has_work:
        while more and len(open_) < wanted:
            one = next(waiting, None)
            if one is None:
                more = False
                break
            _begin(engine, one, open_, driven)
        driven.most_at_once = max(driven.most_at_once, len(open_))
        for update in engine.step():
            _take(engine, update, open_, driven)
        if draw.random() < 0.1:
            wanted = draw.randint(1, most)
        on_progress(driven.requests - len(open_))
    return driven


def _begin(engine: LLMEngine, one: RandomRequest, open_: dict[str, _Open], driven: Driven) -> None:
    request = one.request
    engine.add(engine.prepare(request))
    open_[request.request_id] = _Open(one, request.params.n)
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
    state = open_[update.request_id]
    reason = update.finish_reason or "error"
    if reason == "error":
        raise VerificationError(
            f"request {update.request_id} ({state.random.kind}, {len(state.random.request.prompt_token_ids)} tokens) "
            "ended with an error; see the log"
        )
    driven.finished[reason] += 1
    state.choices -= 1
    if state.choices == 0:
        del open_[update.request_id]
