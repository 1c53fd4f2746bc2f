"""The engine's reports to observers: metrics, traces, recordings, the dashboard. Observers return nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from llmc.runtime.engine.kv_transfer import KVTransfer

FinishReason = Literal["stop", "length", "abort", "error"]


HANDED_OVER = "handed over"
"""Stands for the executable of a step that put prompts into their slots."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A record of one step: the bucket, its live rows and padding, the executable, and seconds for each part of the
    work.

    `requests` are the sequences in its live rows, `lengths` the tokens that each has after the step. `started_s` is
    time.perf_counter() at its start; `schedule_s` covers choosing the step and copying slots, `prepare_s` padding,
    `execute_s` the graph, `sample_s` choosing tokens. A step whose shape no bucket of the plan covers exactly as
    planned (a split, or a graph that had to be compiled) is `miss`. `drafts` live rows had `drafted` guessed tokens in
    all, which count as live, of which `accepted` held.
    """

    phase: str
    batch: int
    query: int
    context: int
    live_rows: int
    live_tokens: int
    padding_tokens: int
    executable: str
    prepare_s: float
    execute_s: float
    sample_s: float
    requests: tuple[int, ...]
    started_s: float = 0.0
    schedule_s: float = 0.0
    miss: bool = False
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    lengths: tuple[int, ...] = ()

    @property
    def handed(self) -> bool:
        """Whether it put prompts into their slots that another executor had computed, and computed nothing."""
        return self.executable == HANDED_OVER

    @property
    def bucket(self) -> str:
        """The bucket as metrics label it: batch x query + context."""
        return f"{self.batch}x{self.query}+{self.context}"


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """A request that ended, however it did. `arrived_at` is time.time() at its arrival; the rest: counts and seconds.

    `queue_s` to its admission, `first_token_s` to its first token (both from arrival, None if it never came to that),
    `e2e_s` to its end; `prefill_s` from admission to the first token, `decode_s` from there to the end.
    `output_tokens` counts all its sequences; `finish_reasons` has one for each of its `n`. `trace_headers` are the
    request's.
    """

    request_id: str
    arrived_at: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reasons: tuple[FinishReason, ...]
    n: int
    max_tokens: int | None
    e2e_s: float
    queue_s: float | None = None
    first_token_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    trace_headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges of now: requests by state, slots, the share of the cache's tokens in use by live sequences (0 … 1), and
    graphs compiled: while serving, and by the toolchain in this process when it opened them."""

    running: int
    waiting: int
    slots: int
    retained_slots: int
    kv_cache_usage: float
    steps: int
    compilations: int
    compilations_at_open: int = 0


class Observer:
    """All methods are called by the engine's threads, one call at a time, must return at once, and do nothing here."""

    def arrived(self, request_id: str, prompt_tokens: int) -> None:
        """A request was queued."""

    def admitted(self, request_id: str, queue_s: float, cached_tokens: int) -> None:
        """The request's first sequence left the queue; `cached_tokens` of its prompt came from a retained prefix."""

    def handed_over(self, cost: KVTransfer) -> None:
        """A prompt that another executor computed came into its slot."""

    def stepped(self, record: StepRecord) -> None:
        """A step ran."""

    def emitted(self, first_token_s: Sequence[float], inter_token_s: Sequence[float]) -> None:
        """Tokens of one step: seconds from arrival for choices' first tokens, since the token before for others (0 for
        one that a draft brought in the same step)."""

    def finished(self, summary: RequestSummary) -> None:
        """A request ended."""


class Observers(Observer):
    """Several observers as one."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self.observers = list(observers)

    def arrived(self, request_id: str, prompt_tokens: int) -> None:
        """Tell each."""
        for o in self.observers:
            o.arrived(request_id, prompt_tokens)

    def admitted(self, request_id: str, queue_s: float, cached_tokens: int) -> None:
        """Tell each."""
        for o in self.observers:
            o.admitted(request_id, queue_s, cached_tokens)

    def handed_over(self, cost: KVTransfer) -> None:
        """Tell each."""
        for o in self.observers:
            o.handed_over(cost)

    def stepped(self, record: StepRecord) -> None:
        """Tell each."""
        for o in self.observers:
            o.stepped(record)

    def emitted(self, first_token_s: Sequence[float], inter_token_s: Sequence[float]) -> None:
        """Tell each."""
        for o in self.observers:
            o.emitted(first_token_s, inter_token_s)

    def finished(self, summary: RequestSummary) -> None:
        """Tell each."""
        for o in self.observers:
            o.finished(summary)
