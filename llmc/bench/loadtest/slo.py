"""Service level objectives: what a request's times must be for it to count."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from llmc.bench.loadtest.outcome import Outcome
from llmc.errors import InputError

NAMES = ("ttft", "itl", "tpot", "e2e")
_LIMIT = re.compile(r"\s*([a-z0-9]+)\s*=\s*([0-9]*\.?[0-9]+)\s*(ms|s)\s*")


def parse(text: str) -> dict[str, float]:
    """Seconds by name of "ttft=500ms,itl=50ms,tpot=40ms,e2e=10s". Raises InputError, naming --slo."""
    found: dict[str, float] = {}
    for part in text.split(","):
        match = _LIMIT.fullmatch(part)
        if match is None or match[1] not in NAMES or match[1] in found:
            raise InputError(
                f"--slo {text!r}: {part.strip()!r} is not one of {', '.join(NAMES)}, once each, with a time in "
                "ms or s, as in ttft=500ms,itl=50ms"
            )
        found[match[1]] = float(match[2]) * (0.001 if match[3] == "ms" else 1.0)
    return found


def meets(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    """Whether a whole answer kept every limit: `itl` is for each of its gaps, the others for the request."""
    if not outcome.ok:
        return False
    gaps = outcome.gaps_s
    times = {"ttft": outcome.ttft_s, "itl": max(gaps, default=None), "tpot": outcome.tpot_s, "e2e": outcome.e2e_s}
    return all((took := times[name]) is None or took <= limit for name, limit in limits.items())


def count(outcomes: Iterable[Outcome], limits: Mapping[str, float]) -> int:
    """How many requests meet all limits."""
    return sum(meets(outcome, limits) for outcome in outcomes)
