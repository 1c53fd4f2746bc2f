"""The synchronous engine: requests over an engine core, their texts and stop strings, and reports to observers.

A request of n choices (best_of, if more are generated than returned) runs as that many sequences of one group, so its
prompt is computed once.
"""

from __future__ import annotations

import itertools
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from llmc.errors import InputError
from llmc.runtime.engine.observer import FinishReason, Observer, RequestSummary
from llmc.runtime.engine.requests import Request, Update
from llmc.runtime.engine.sampling.batch import TokenLogprobs
from llmc.runtime.engine.sampling.sampler import bad_word_ids
from llmc.runtime.engine.text_assembly import SequenceText, StopStrings

if TYPE_CHECKING:
    from llmc.runtime.engine.core import EngineCore, StepOutput, TokenEvent
    from llmc.runtime.engine.kv_transfer import KVTransfer
    from llmc.runtime.engine.observer import EngineStats
    from llmc.runtime.engine.sampling.constraints import ConstraintFactory, GrammarConstraint
    from llmc.runtime.engine.sampling.sampler import SequenceSampler
    from llmc.runtime.text.tokenizer import Tokenizer

LONG_WORK = 2000
"""A request with at least this much work (`work_of`) is prepared in a thread, to keep the event loop free."""


@dataclass(slots=True)
class _Choice:
    sequence: int
    index: int
    text: SequenceText
    logprob: float = 0.0
    tokens: int = 0
    last_s: float = 0.0
    reason: FinishReason | None = None


@dataclass(slots=True)
class _Running:
    request: Request
    choices: list[_Choice]
    arrived_at: float
    arrived_s: float
    admitted_s: float | None = None
    first_s: float | None = None
    cached: int = 0
    kv_transfer: KVTransfer | None = None
    open: int = field(default=0)
    held: list[Update] = field(default_factory=list)

    @property
    def selects(self) -> bool:
        """Whether more choices are generated than returned. All must then end before the best are known."""
        return len(self.choices) > self.request.params.n


@dataclass(frozen=True, slots=True)
class Prepared:
    """A validated request: its samplers, and its choices' shared scheduler prompt and stop-string matcher."""

    request: Request
    samplers: tuple[SequenceSampler, ...]
    prompt: array[int]
    stops: StopStrings


class LLMEngine:
    """Runs requests on `core`. Not thread-safe, except `prepare` and `report`.

    `report` may run in another thread for one step while the next step runs. `tokenizer` is None for a model without
    one, whose outputs are token ids only. `constraints` opens the constraint factory at the first request with
    structured outputs. `observer` receives all request and step events.
    """

    def __init__(
        self, core: EngineCore, tokenizer: Tokenizer | None = None,
        constraints: Callable[[bool], ConstraintFactory] | None = None, observer: Observer | None = None,
    ) -> None:  # fmt: skip
        self.core = core
        self.tokenizer = tokenizer
        self.observer = observer or Observer()
        self._open_constraints = constraints
        self._factory: ConstraintFactory | None = None
        self._opening = threading.Lock()
        self._numbers = itertools.count()
        self._running: dict[str, _Running] = {}
        self._choices: dict[int, tuple[_Running, _Choice]] = {}
        self._changing = threading.RLock()
        self._ended: deque[int] = deque()

    def prepare(self, request: Request) -> Prepared:
        """Validate a request and compile its grammar, if any. Thread-safe.

        Raises InputError for a prompt that cannot run here and for parameters that cannot be met.
        """
        request, structured = self._checked(request), request.params.structured_outputs
        return self._prepared(request, None if structured is None else self.constraints().compile(structured))

    async def aprepare(self, request: Request) -> Prepared:
        """Prepare on an event loop, without blocking it while a grammar compiles. Cancelling ends the compilation."""
        import asyncio  # the first token needs none

        structured, long = request.params.structured_outputs, work_of(request) >= LONG_WORK
        if structured is None:
            return await asyncio.to_thread(self.prepare, request) if long else self.prepare(request)
        request = await asyncio.to_thread(self._checked, request) if long else self._checked(request)
        if self._factory is None:
            await asyncio.to_thread(self.constraints)
        constraint = await self.constraints().acompile(structured)
        return await asyncio.to_thread(self._prepared, request, constraint)

    def _checked(self, request: Request) -> Request:
        """The request with its prompt truncated as it says. Raises InputError if it cannot run here."""
        params = request.params
        self.core.require_offered(params)
        if params.truncate_prompt_tokens is not None:
            request = replace(request, prompt_token_ids=request.prompt_token_ids[-params.truncate_prompt_tokens :])
        self.core.check(request.prompt_token_ids)
        if params.stop_strings and self.tokenizer is None:
            raise InputError("stop strings need text, and this bundle has no tokenizer; use stop_token_ids")
        return request

    def _prepared(self, request: Request, constraint: GrammarConstraint | None) -> Prepared:
        params = request.params
        ranked = params.choices > params.n
        if ranked and params.logprobs is None:
            params = replace(params, logprobs=0)
        words: tuple[tuple[int, ...], ...] = ()
        if params.bad_words and self.tokenizer is not None:
            tokenizer = self.tokenizer
            words = bad_word_ids(params.bad_words, lambda text: tokenizer.encode(text, add_special_tokens=False))
        ids = request.prompt_token_ids
        first = self.core.sampler(ids, params.child(0), request.end_ids, constraint, words)
        samplers = (first, *(first.sibling(params.child(i)) for i in range(1, params.choices)))
        return Prepared(request, samplers, array("q", ids), StopStrings(params.stop_strings))

    def constraints(self, at_once: bool = True) -> ConstraintFactory:
        """The constraint factory, opened on first use. Set `at_once` if a grammar waits for it.

        Raises InputError without a tokenizer or llguidance.
        """
        if self._open_constraints is None:
            raise InputError("structured outputs need a tokenizer, and this bundle has none")
        with self._opening:
            if self._factory is None:
                self._factory = self._open_constraints(at_once)
        return self._factory

    def close(self) -> None:
        """End the processes that try grammars, and the prefill side."""
        if self.core.prefiller is not None:
            self.core.prefiller.close()
        if self._factory is not None:
            self._factory.close()

    def add(self, prepared: Prepared) -> list[int]:
        """Queue a request and return its sequences' numbers, as used in step records.

        Raises InputError if a request with that request_id runs.
        """
        with self._changing:
            return self._add(prepared)

    def _add(self, prepared: Prepared) -> list[int]:
        request = prepared.request
        if request.request_id in self._running:
            raise InputError(f"a request with id {request.request_id!r} runs already; ids must differ")
        numbers = [next(self._numbers) for _ in prepared.samplers]
        group = numbers[0] if len(numbers) > 1 else None
        choices = [
            _Choice(number, i, SequenceText(self.tokenizer, sampler.params, request.prompt_token_ids, prepared.stops))
            for i, (number, sampler) in enumerate(zip(numbers, prepared.samplers, strict=True))
        ]
        now = time.perf_counter()
        running = _Running(request, choices, time.time(), now, open=len(choices))
        for choice, sampler in zip(choices, prepared.samplers, strict=True):
            self.core.add(
                choice.sequence, prepared.prompt, sampler, priority=request.priority, group=group,
                adapter=request.adapter,
            )  # fmt: skip
            self._choices[choice.sequence] = (running, choice)
        self._running[request.request_id] = running
        self.observer.arrived(request.request_id, len(request.prompt_token_ids))
        return numbers

    def cancel(self, request_id: str) -> list[Update]:
        """Cancel a request and return an update for each open choice. Its slots are free before the next step."""
        with self._changing:
            running = self._running.get(request_id)
            if running is None:
                return []
            updates = [self._end(running, choice, "abort") for choice in running.choices if choice.reason is None]
            self.settle()
            return self._selected(running, updates)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._running)

    def runs(self, request_id: str) -> bool:
        """Whether the request is unfinished."""
        return request_id in self._running

    @property
    def stats(self) -> EngineStats:
        """Current gauges. running and waiting count requests, each once regardless of its choices."""
        return self.stats_with(self.core.stats)

    def stats_with(self, engine: EngineStats) -> EngineStats:
        """Combine the core's gauges `engine` with the request counts. The thread that calls `report` may call this."""
        with self._changing:
            waiting = sum(r.admitted_s is None for r in self._running.values())
            return replace(engine, waiting=waiting, running=len(self._running) - waiting)

    def step(self) -> list[Update]:
        """Run one step and return its updates. Raises the executor's errors."""
        outcome = self.run()
        updates = [] if outcome is None else self.report(outcome, time.perf_counter())
        self.settle()
        return updates

    def run(self) -> StepOutput | None:
        """Run one step, to be reported later; None if there is nothing to do. Raises the executor's errors."""
        self.settle()
        return self.core.step()

    def settle(self) -> None:
        """End sequences in the core that `report` found finished, at a stop string or by their caller."""
        while self._ended:
            self.core.cancel(self._ended.popleft())

    def report(self, outcome: StepOutput, ended_s: float) -> list[Update]:
        """The updates of a step that ended at `ended_s` (perf_counter).

        A sequence that ends at a stop string stays in the core until `settle`.
        """
        with self._changing:
            return self._report(outcome, ended_s)

    def _report(self, outcome: StepOutput, now: float) -> list[Update]:
        self._hand(outcome.handed)
        self._admit(outcome.admitted, outcome.record.started_s)
        first: list[float] = []
        between: list[float] = []
        updates: list[Update] = []
        for token in outcome.tokens:
            if token.sequence not in self._choices:
                continue  # a stop string ended it in the middle of the step's tokens
            running, choice = self._choices[token.sequence]
            if token.token_id is None:
                reason = token.finish_reason or "error"
                ended = self._end(running, choice, reason, choice.text.flush())
                updates += self._selected(running, [replace(ended, error=token.error)])
                continue
            running.first_s = running.first_s or now
            if choice.tokens:
                between.append(now - choice.last_s)
            else:
                first.append(now - running.arrived_s)
            choice.last_s = now
            updates += self._selected(running, [self._took(running, choice, token, token.token_id)])
        self._observe(outcome, first, between)
        return updates

    def _admit(self, admitted: Iterable[tuple[int, int]], now: float) -> None:
        for sequence, cached in admitted:
            if sequence not in self._choices:
                continue
            running, _ = self._choices[sequence]
            if running.admitted_s is None:
                running.admitted_s, running.cached = now, cached
                self.observer.admitted(running.request.request_id, now - running.arrived_s, cached)

    def _hand(self, handed: Mapping[int, KVTransfer]) -> None:
        """Record prompts from the prefill side: their requests left the queue when it started them."""
        for sequence, cost in handed.items():
            if sequence not in self._choices:
                continue
            running, _ = self._choices[sequence]
            if running.kv_transfer is None:
                running.kv_transfer, running.cached = cost, cost.cached_tokens
                running.admitted_s = running.arrived_s + cost.queue_s
                self.observer.admitted(running.request.request_id, cost.queue_s, cost.cached_tokens)
                self.observer.handed_over(cost)

    def _observe(self, outcome: StepOutput, first: list[float], between: list[float]) -> None:
        self.observer.stepped(outcome.record)
        if first or between:
            self.observer.emitted(first, between)

    def _took(self, running: _Running, choice: _Choice, token: TokenEvent, token_id: int) -> Update:
        choice.tokens += 1
        text = choice.text.feed(token_id, token.ends, token.finish_reason is not None)
        if token.logprobs is not None:
            choice.logprob += token.logprobs.logprob
        reason, stopped = token.finish_reason, choice.text.stopped_at
        if stopped is not None:
            reason = "stop"
            self._ended.append(choice.sequence)
        stop_reason: str | int | None = stopped
        if stopped is None and token.ends and token_id in (running.request.params.stop_token_ids or ()):
            stop_reason = token_id
        logprobs: tuple[TokenLogprobs, ...] = ()
        if token.logprobs is not None and running.request.params.logprobs is not None:
            logprobs = (token.logprobs,)
        if reason is not None:
            self._close(running, choice, reason)
        return Update(
            running.request.request_id, choice.index, text, (token_id,), logprobs, reason, stop_reason,
            running.cached, running.kv_transfer if choice.tokens == 1 else None,
        )  # fmt: skip

    def _end(self, running: _Running, choice: _Choice, reason: FinishReason, text: str = "") -> Update:
        self._ended.append(choice.sequence)
        self._close(running, choice, reason)
        return Update(
            running.request.request_id, choice.index, text, finish_reason=reason, cached_tokens=running.cached
        )

    def _close(self, running: _Running, choice: _Choice, reason: FinishReason) -> None:
        choice.reason = reason
        del self._choices[choice.sequence]
        running.open -= 1
        if running.open == 0:
            del self._running[running.request.request_id]
            self.observer.finished(_summary(running))

    def _selected(self, running: _Running, updates: list[Update]) -> list[Update]:
        """The updates; with best_of, none until all choices have ended."""
        if not running.selects:
            return updates
        running.held += updates
        if running.open:
            return []
        ranked = sorted(running.choices, key=lambda c: (c.reason == "error", -c.logprob / max(1, c.tokens)))
        best = ranked[: running.request.params.n]
        rank = {choice.index: position for position, choice in enumerate(best)}
        return [replace(u, index=rank[u.index]) for u in running.held if u.index in rank]


def work_of(request: Request) -> int:
    """Estimated cost of preparing a request, roughly in microseconds."""
    params = request.params
    lists = (params.stop_token_ids, params.allowed_token_ids, params.logit_bias)
    return (
        len(request.prompt_token_ids) // 10 + 30 * params.choices + sum(len(ids) for ids in lists if ids)
        + sum(map(len, params.stop_strings)) + 30 * len(params.bad_words or ())
    )  # fmt: skip


def _summary(running: _Running) -> RequestSummary:
    now, request = time.perf_counter(), running.request
    since = running.arrived_s

    def lasted(start: float | None, end: float | None) -> float | None:
        return None if start is None or end is None else end - start

    return RequestSummary(
        request.request_id, running.arrived_at, len(request.prompt_token_ids), running.cached,
        sum(c.tokens for c in running.choices), tuple(c.reason or "abort" for c in running.choices),
        request.params.n, request.params.max_tokens, now - since, lasted(since, running.admitted_s),
        lasted(since, running.first_s), lasted(running.admitted_s, running.first_s), lasted(running.first_s, now),
        request.params.temperature, request.params.top_p, request.trace_headers,
    )  # fmt: skip
