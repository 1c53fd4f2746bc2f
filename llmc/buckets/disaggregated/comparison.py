"""Comparison of disaggregated prefill/decode with each device alone, over the same requests: values and a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llmc.buckets.disaggregated.device import Link, Sharing, Stage
from llmc.buckets.disaggregated.simulate import BOUND, SimulatedRun, alone, pipeline
from llmc.buckets.disaggregated.steady import BreakEven, break_even
from llmc.buckets.render.text import table
from llmc.buckets.traffic.events import TrafficRequest

REFERENCE_TOKENS = 1024
"""Prompt length for which the report states the KV transfer time."""


@dataclass(frozen=True)
class Comparison:
    """Outcomes of the prefill device alone, the decode device alone, and both together."""

    prefill: Stage
    decode: Stage
    link: Link
    sharing: Sharing
    slots: int
    alone: tuple[SimulatedRun, SimulatedRun]
    disaggregated: SimulatedRun
    break_even: tuple[BreakEven, ...]

    @property
    def better(self) -> int:
        """The better single device: 0 is the prefill device, 1 the decode device."""
        return int(self.alone[1].tokens_per_s >= self.alone[0].tokens_per_s)

    @property
    def gain(self) -> float:
        """New tokens per second of both devices relative to the better single device."""
        return self.disaggregated.tokens_per_s / self.alone[self.better].tokens_per_s

    @property
    def limited_by(self) -> str:
        """The bottleneck of the pair."""
        if self.sharing.shared:
            return "the machine that both run on"
        half = self.disaggregated.moving_s / 2
        prefill, decode = self.disaggregated.prefill_s + half, self.disaggregated.decode_s + half
        stage = self.prefill if prefill >= decode else self.decode
        return f"{'prompts' if prefill >= decode else 'decode steps'} on {stage.name}"

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as a JSON object; seconds, tokens and requests per second."""
        return {
            "gain": round(self.gain, 4),
            "pays": self.gain > 1,
            "better": self._names()[self.better],
            "limited_by": self.limited_by,
            "hand_over": {
                "bytes_per_token": self.link.token_bytes, "gb_per_s": self.link.gb_per_s,
                "latency_s": self.link.latency_s, f"seconds_of_{REFERENCE_TOKENS}_tokens":
                round(self.link.total_s(REFERENCE_TOKENS), 6), "seconds": round(self.disaggregated.moving_s, 6),
            },
            "sharing": asdict(self.sharing),
            "max_num_seqs": self.slots,
            "prefill_alone": _numbers(self.alone[0], self.prefill),
            "decode_alone": _numbers(self.alone[1], self.decode),
            "disaggregated": _numbers(self.disaggregated, None),
            "break_even": [asdict(one) for one in self.break_even],
        }  # fmt: skip

    def text(self) -> str:
        """Return the report, ending in a newline."""
        return "\n".join(self._lines()) + "\n"

    def _names(self) -> tuple[str, str]:
        if self.prefill.name == self.decode.name:
            return f"{self.prefill.name} (prompts)", f"{self.decode.name} (decode)"
        return self.prefill.name, self.decode.name

    def _lines(self) -> Iterator[str]:
        rows = [("", "requests/s", "tokens/s", "first token p50", "p95", "prompts busy", "decode busy")]
        names = [f"{name} alone" for name in self._names()]
        for name, found in zip((*names, "disaggregated"), (*self.alone, self.disaggregated), strict=True):
            rows.append((
                name, f"{found.requests_per_s:.2f}", f"{found.tokens_per_s:.1f}", _time(found.first_token(0.5)),
                _time(found.first_token(0.95)), f"{found.prefill_s / found.seconds:.0%}",
                f"{found.decode_s / found.seconds:.0%}",
            ))  # fmt: skip
        yield from table(rows, right=range(1, 7))
        yield ""
        verdict = "it pays" if self.gain > 1 else "it does not pay"
        yield f"disaggregated: {self.gain:.2f} × {self._names()[self.better]} alone, the better of the two: {verdict}"
        yield f"limited by {self.limited_by}; {self.slots} sequences at once"
        at, link = REFERENCE_TOKENS, self.link
        yield (
            f"KV transfer: {link.token_bytes:,} bytes a token at {link.gb_per_s:g} GB/s; {at:,} tokens "
            f"({link.bytes(at) / 1e6:.1f} MB) take {_time(link.total_s(at))}"
        )
        if self.sharing.shared:
            yield f"both on one machine: two steps at once take {self.sharing.contention:g} × the sum of their times"
        yield ""
        yield from _break_even_lines(self.break_even)


def compare(
    requests: Sequence[TrafficRequest], prefill: Stage, decode: Stage, link: Link, slots: int, sharing: Sharing,
    longest: int, bound: int = BOUND,
) -> Comparison:  # fmt: skip
    """Compare over `requests`, in arrival order; `longest` is the longest sequence of the break-even, in tokens.

    Raises InputError without requests.
    """
    return Comparison(
        prefill, decode, link, sharing, slots,
        (alone(requests, prefill, slots), alone(requests, decode, slots)),
        pipeline(requests, prefill, decode, link, slots, sharing, bound),
        tuple(break_even(prefill, decode, link, slots, sharing, longest)),
    )  # fmt: skip


def _numbers(found: SimulatedRun, stage: Stage | None) -> dict[str, Any]:
    return {
        **({} if stage is None else {"device": stage.name}),
        "requests": found.requests, "seconds": round(found.seconds, 6),
        "requests_per_s": round(found.requests_per_s, 4), "tokens_per_s": round(found.tokens_per_s, 3),
        "first_token_s": {"p50": round(found.first_token(0.5), 6), "p95": round(found.first_token(0.95), 6)},
        "prefill_s": round(found.prefill_s, 6), "decode_s": round(found.decode_s, 6),
    }  # fmt: skip


def _break_even_lines(found: Sequence[BreakEven]) -> Iterator[str]:
    if not found:
        return
    yield "always busy, equal requests:"
    rows = [("output tokens", "pays for prompts of", "most", "at a prompt of")]
    for one in found:
        where = "none" if one.least is None else f"{one.least:,} to {one.most:,}"
        rows.append((f"{one.output:,}", where, f"{one.gain:.2f} ×", f"{one.best:,}"))
    yield from table(rows, right=(0, 2, 3))


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
