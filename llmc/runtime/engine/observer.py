"""The engine's reports to observers: metrics, traces, recordings and the dashboard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from llmc.runtime.engine.kv_transfer import KVTransfer

FinishReason = Literal["stop", "length", "abort", "error"]


HANDED_OVER = "handed over"
"""The executable name of a step that only imported transferred prompts."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: its bucket, live rows and padding, executable, and the seconds of each phase.

    `requests` are the sequences of the live rows, `lengths` their token counts after the step. `started_s` is
    time.perf_counter() at its start; `schedule_s` covers scheduling and copying slots, `prepare_s` padding, `execute_s`
    the graph, `sample_s` sampling. `miss`: no bucket of the plan fits exactly as planned (the step was split, or a
    graph had to be compiled). `drafts` live rows had `drafted` drafted tokens in total, which count as live; `accepted`
    of them were accepted.
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
        """Whether the step only imported prompts that another executor computed."""
        return self.executable == HANDED_OVER

    @property
    def bucket(self) -> str:
        """The bucket's label in metrics: batch x query + context."""
        return f"{self.batch}x{self.query}+{self.context}"


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """A finished request. `arrived_at` is time.time() at arrival; other fields are counts and seconds.

    `queue_s` and `first_token_s` run from arrival to admission and first token (None if never reached), `e2e_s` to the
    end. `prefill_s` runs from admission to the first token, `decode_s` from there to the end. `output_tokens` counts
    all its sequences; `finish_reasons` has one entry for each of its `n` choices. `trace_headers` are the request's.
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
    """Current gauges: requests by state, slots, cache usage (0 … 1) and compilation counts.

    Cache usage counts tokens of live sequences. Compilations are counted separately while serving and at open, by the
    toolchain in this process.
    """

    running: int
    waiting: int
    slots: int
    retained_slots: int
    kv_cache_usage: float
    steps: int
    compilations: int
    compilations_at_open: int = 0


class Observer:
    """Receives engine events. The engine's threads call one method at a time; methods must return at once."""

    def arrived(self, request_id: str, prompt_tokens: int) -> None:
        """A request was queued."""

    def admitted(self, request_id: str, queue_s: float, cached_tokens: int) -> None:
        """The request's first sequence left the queue; `cached_tokens` of its prompt came from a cached prefix."""

    def handed_over(self, cost: KVTransfer) -> None:
        """A prompt that another executor computed was imported into its slot."""

    def stepped(self, record: StepRecord) -> None:
        """A step ran."""

    def emitted(self, first_token_s: Sequence[float], inter_token_s: Sequence[float]) -> None:
        """Tokens of one step: seconds since arrival for first tokens, and ITL in seconds for others.

        The ITL is 0 for a token that a draft brought in the same step.
        """

    def finished(self, summary: RequestSummary) -> None:
        """A request ended."""


class Observers(Observer):
    """Forwards events to several observers."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self.observers = list(observers)

    def arrived(self, request_id: str, prompt_tokens: int) -> None:
        """Forward to each observer."""
        for o in self.observers:
            o.arrived(request_id, prompt_tokens)

    def admitted(self, request_id: str, queue_s: float, cached_tokens: int) -> None:
        """Forward to each observer."""
        for o in self.observers:
            o.admitted(request_id, queue_s, cached_tokens)

    def handed_over(self, cost: KVTransfer) -> None:
        """Forward to each observer."""
        for o in self.observers:
            o.handed_over(cost)

    def stepped(self, record: StepRecord) -> None:
        """Forward to each observer."""
        for o in self.observers:
            o.stepped(record)

    def emitted(self, first_token_s: Sequence[float], inter_token_s: Sequence[float]) -> None:
        """Forward to each observer."""
        for o in self.observers:
            o.emitted(first_token_s, inter_token_s)

    def finished(self, summary: RequestSummary) -> None:
        """Forward to each observer."""
        for o in self.observers:
            o.finished(summary)
