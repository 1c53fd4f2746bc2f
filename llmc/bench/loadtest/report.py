"""The figures of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from llmc.bench.loadtest import slo
from llmc.bench.loadtest.outcome import Outcome

VERSION = 1
"""Of the JSON document."""

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Distribution:
    """Seconds: mean, percentiles (linear between the two nearest) and maximum of `count` values."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Distribution | None:
        """Of the values that are there; None without any."""
        found = np.array([value for value in values if value is not None])
        if not found.size:
            return None
        p50, p90, p95, p99 = np.percentile(found, PERCENTILES).tolist()
        return cls(found.size, float(found.mean()), p50, p90, p95, p99, float(found.max()))


@dataclass(frozen=True)
class ErrorCount:
    """How many requests failed in one way, and what the first of them was told."""

    kind: str
    count: int
    example: str


@dataclass(frozen=True)
class Goodput:
    """Requests that kept every limit (seconds by name): how many, their share of all sent, and how many a second."""

    limits: Mapping[str, float]
    requests: int
    share: float
    per_second: float


@dataclass(frozen=True)
class Report:
    """What a run measured. Tokens and rates count whole answers only; times are in seconds.

    `duration_s` from the first request's due time to the last one's end. `latency`: `ttft` and `e2e` count from the
    time at which a request was due, `itl` is of every gap between two pieces of text, `tpot` of each request's mean
    time a token after its first; `connect` is part of ttft. `refused` answers were 429 or 503, and
    `refusal` is how long these took. `peak_concurrency` is of requests sent and not ended. `late_p99_s` is how
    late this client sent, `client_cpu` its share of one core. `counted` says whether the server counted tokens;
    otherwise pieces of text count as tokens, and prompts as what was asked for. `unfinished` requests of the workload
    were not sent, or had not ended, when an interrupt ended the run; they count nowhere else.
    """

    url: str
    model: str
    endpoint: str
    sent: str
    requests: int
    ok: int
    refused: int
    failed: int
    errors: tuple[ErrorCount, ...]
    duration_s: float
    request_rate: float
    prompt_tokens: int
    output_tokens: int
    asked_prompt_tokens: int
    asked_output_tokens: int
    cached_tokens: int
    output_rate: float
    total_rate: float
    latency: Mapping[str, Distribution | None]
    refusal: Distribution | None
    retry_after_s: tuple[float, float] | None
    peak_concurrency: int
    late_p99_s: float
    client_cpu: float
    counted: bool
    goodput: Goodput | None
    outcomes: tuple[Outcome, ...] = field(repr=False)
    unfinished: int = 0

    def to_dict(self, *, each: bool = False) -> dict[str, Any]:
        """For JSON; with `each` every request's own times too."""
        found = {name: value for name, value in vars(self).items() if name not in ("outcomes", "latency", "errors")}
        for name in ("refusal", "goodput"):
            found[name] = None if found[name] is None else asdict(found[name])
        found["latency"] = {name: None if d is None else asdict(d) for name, d in self.latency.items()}
        found["errors"] = [asdict(error) for error in self.errors]
        if each:
            found["each"] = [asdict(outcome) for outcome in self.outcomes]
        return {"version": VERSION, **found}


def make_report(
    outcomes: Sequence[Outcome],
    *,
    url: str = "",
    model: str = "",
    endpoint: str = "completions",
    sent: str = "",
    objectives: Mapping[str, float] | None = None,
    client_cpu: float = 0.0,
    unfinished: int = 0,
) -> Report:
    """The figures of a run's outcomes, at least one."""
    whole = [outcome for outcome in outcomes if outcome.ok]
    refused = [o for o in outcomes if o.failure is not None and o.failure.refused]
    duration = max(o.ended_s for o in outcomes) - min(o.due_s for o in outcomes)
    per_second = 1 / duration if duration > 0 else 0.0
    prompt = sum(o.asked_prompt if o.prompt_tokens is None else o.prompt_tokens for o in whole)
    output = sum(o.tokens for o in whole)
    retries = [o.failure.retry_after_s for o in refused if o.failure and o.failure.retry_after_s is not None]
    return Report(
        url=url,
        model=model,
        endpoint=endpoint,
        sent=sent,
        requests=len(outcomes),
        ok=len(whole),
        refused=len(refused),
        failed=len(outcomes) - len(whole) - len(refused),
        errors=_errors(outcomes),
        duration_s=duration,
        request_rate=len(whole) * per_second,
        prompt_tokens=prompt,
        output_tokens=output,
        asked_prompt_tokens=sum(o.asked_prompt for o in whole),
        asked_output_tokens=sum(o.asked_output for o in whole),
        cached_tokens=sum(o.cached_tokens or 0 for o in whole),
        output_rate=output * per_second,
        total_rate=(prompt + output) * per_second,
        latency={
            "ttft": Distribution.of(o.ttft_s for o in whole),
            "itl": Distribution.of(gap for o in whole for gap in o.gaps_s),
            "tpot": Distribution.of(o.tpot_s for o in whole),
            "e2e": Distribution.of(o.e2e_s for o in whole),
            "connect": Distribution.of(None if o.connected_s is None else o.connected_s - o.sent_s for o in whole),
        },
        refusal=Distribution.of(o.ended_s - o.sent_s for o in refused),
        retry_after_s=(min(retries), max(retries)) if retries else None,
        peak_concurrency=peak(outcomes),
        late_p99_s=float(np.percentile([o.sent_s - o.due_s for o in outcomes], 99)),
        client_cpu=client_cpu,
        counted=all(o.output_tokens is not None for o in whole),
        goodput=_goodput(outcomes, objectives, duration) if objectives else None,
        outcomes=tuple(sorted(outcomes, key=lambda o: o.index)),
        unfinished=unfinished,
    )


def peak(outcomes: Iterable[Outcome]) -> int:
    """The most requests that were sent and not ended at a time."""
    moments = sorted([(o.sent_s, 1) for o in outcomes] + [(o.ended_s, -1) for o in outcomes])
    return int(np.cumsum([step for _, step in moments]).max())


def _goodput(outcomes: Sequence[Outcome], limits: Mapping[str, float], duration: float) -> Goodput:
    good = slo.count(outcomes, limits)
    return Goodput(dict(limits), good, good / len(outcomes), good / duration if duration > 0 else 0.0)


def _errors(outcomes: Iterable[Outcome]) -> tuple[ErrorCount, ...]:
    """The most frequent first."""
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.failure is not None:
            found.setdefault(outcome.failure.kind, []).append(outcome.failure.message)
    counts = [ErrorCount(kind, len(messages), messages[0]) for kind, messages in found.items()]
    return tuple(sorted(counts, key=lambda error: (-error.count, error.kind)))
