"""A report in words."""

from __future__ import annotations

from llmc.bench.loadtest.report import Distribution, Report
from llmc.buckets.render.text import table

LATE_S = 0.01
"""Seconds; the report mentions it if the client sent later than this."""
BUSY = 0.7
"""From this share of a core on, the client's own work affects the figures."""
OFF = 0.02
"""The share by which token counts may differ from the requested ones before the report mentions it."""

NAMES = {
    "ttft": "time to first token",
    "itl": "between pieces of text",
    "tpot": "a token after the first",
    "e2e": "whole answer",
    "connect": "to connect",
}


def text(report: Report) -> str:
    """The report for a person: requests, throughput, the table of percentiles, and what to beware of."""
    lines = [
        f"{report.model} at {report.url}, {report.endpoint}: {report.sent}",
        f"requests    {report.requests}: {report.ok} ok, {report.refused} refused, {report.failed} failed, "
        f"in {report.duration_s:.2f} s; {report.peak_concurrency} at once at most",
        f"throughput  {report.request_rate:.2f} requests/s, {report.output_rate:.1f} generated tokens/s, "
        f"{report.total_rate:.1f} tokens/s with prompts",
        f"tokens      {report.prompt_tokens} in prompts"
        + (f" ({report.cached_tokens} cached)" if report.cached_tokens else "")
        + f", {report.output_tokens} generated",
    ]
    if report.goodput is not None:
        good = report.goodput
        limits = ", ".join(f"{name} ≤ {seconds * 1e3:g} ms" for name, seconds in good.limits.items())
        lines.append(
            f"goodput     {good.per_second:.2f} requests/s: {good.requests} of {report.requests} "
            f"({good.share:.1%}) kept {limits}"
        )
    lines += ["", *_latencies(report)]
    if report.errors:
        lines += ["", *table([("errors", "count", "the first"), *_errors(report)], right=(1,))]
    notes = list(_notes(report))
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


def _latencies(report: Report) -> list[str]:
    rows: list[tuple[str, ...]] = [("ms", "", "mean", "p50", "p90", "p95", "p99", "max")]
    rows += [_row(name.upper() if name != "connect" else "", NAMES[name], d) for name, d in report.latency.items() if d]
    if report.refusal is not None:
        rows.append(_row("", "to be refused", report.refusal))
    return table(rows, right=range(2, 8))


def _row(name: str, meaning: str, d: Distribution) -> tuple[str, ...]:
    return (name, meaning, *(f"{value * 1e3:.1f}" for value in (d.mean, d.p50, d.p90, d.p95, d.p99, d.max)))


def _errors(report: Report) -> list[tuple[str, str, str]]:
    return [(error.kind, str(error.count), error.example) for error in report.errors]


def _notes(report: Report) -> list[str]:
    notes = []
    if report.unfinished:
        notes.append(
            f"interrupted: {report.unfinished} of {report.requests + report.unfinished} requests were not sent or had "
            "not ended; the figures are of the others"
        )
    if report.retry_after_s is not None:
        low, high = report.retry_after_s
        notes.append(f"refusals said to come again after {low:g} s" if low == high else
                     f"refusals said to come again after {low:g} to {high:g} s")  # fmt: skip
    elif report.refused:
        notes.append("refusals did not say when to come again (no Retry-After)")
    if not report.counted:
        notes.append("the server sent no usage: pieces of text are counted as tokens, and prompts as asked for")
    for what, got, asked in (
        ("prompts", report.prompt_tokens, report.asked_prompt_tokens),
        ("answers", report.output_tokens, report.asked_output_tokens),
    ):
        if asked and abs(got - asked) > OFF * asked:
            notes.append(f"{what} had {got} tokens where the workload asks for {asked} ({got / asked:.0%})")
    if report.late_p99_s > LATE_S:
        notes.append(f"this client sent late: up to {report.late_p99_s * 1e3:.0f} ms (p99); latencies include that")
    if report.client_cpu > BUSY:
        notes.append(f"this client used {report.client_cpu:.0%} of a core: its own delays may be in the figures")
    return notes
