"""What another plan would save on the traffic that a server had, with no more graphs of each phase.

    python -m llmc.buckets.planner.replanning < {"plan": …, "metrics": …} > Offer.to_dict()

runs beside a server, so that planning holds up nothing there. `metrics` is a scrape of /metrics, whose histograms of
lengths are the traffic; requests are drawn from them, so figures are estimates.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.buckets.evaluation.replay import replay
from llmc.buckets.plan import Plan
from llmc.buckets.planner.budget import Budget
from llmc.buckets.planner.planner import PlanInputs, plan_from
from llmc.buckets.strategies import TRAFFIC
from llmc.buckets.traffic.formats.prometheus.exposition import samples
from llmc.buckets.traffic.formats.prometheus.increase import Increase
from llmc.buckets.traffic.source import Traffic
from llmc.errors import LlmcError

if TYPE_CHECKING:
    from llmc.buckets.evaluation.replay import Evaluation


@dataclass(frozen=True)
class Offer:
    """By phase: padding as a share of real tokens (0.118 is 11.8%), `now` and with the `best` plan, what that saves of
    padded tokens, and the graphs that both have. `requests` that it was planned for."""

    requests: int
    now: Mapping[str, float | None]
    best: Mapping[str, float | None]
    gain: Mapping[str, float]
    graphs: Mapping[str, int]
    best_graphs: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def offer(plan: Plan, metrics: str) -> Offer | None:
    """For a server of `plan` whose /metrics is this; None before it had a request. Raises InputError."""
    grown = Increase("/metrics")
    grown.add(samples(metrics.split("\n")))
    if not grown.requests:
        return None
    with tempfile.TemporaryDirectory(prefix="llmc-replanning-") as folder:
        scrape = Path(folder) / "now.prom"
        scrape.write_text(metrics, encoding="utf-8")
        traffic, graphs = Traffic(scrape), _graphs(plan)
        old = replay(plan, traffic)
        inputs = PlanInputs(plan.limits, TRAFFIC, traffic=traffic)
        best = plan_from(inputs, Budget(max_graphs=max(graphs.values())), None, {})
        new = replay(best, traffic)
    return Offer(old.prompt.requests, _padding(old), _padding(new), gains(old, new), graphs, _graphs(best))


def gains(old: Evaluation, new: Evaluation) -> dict[str, float]:
    """What a plan saves of each phase's padded tokens, 0 … 1; negative where it pads more."""
    pairs = {"prompt": (old.prompt, new.prompt), "decode": (old.decode, new.decode)}
    return {
        phase: 1 - after.padded_tokens / before.padded_tokens if before.padded_tokens else 0.0
        for phase, (before, after) in pairs.items()
    }


def _graphs(plan: Plan) -> dict[str, int]:
    return {"prompt": len(plan.prompt), "decode": len(plan.decode)}


def _padding(found: Evaluation) -> dict[str, float | None]:
    return {"prompt": found.prompt.padding, "decode": found.decode.padding}


def main() -> None:
    """See the module's docstring; what is wrong stands in "error"."""
    requested = json.load(sys.stdin)
    try:
        found = offer(Plan.from_json(json.dumps(requested["plan"])), requested["metrics"])
        reported: dict[str, Any] = {"offer": None if found is None else found.to_dict()}
    except LlmcError as error:
        reported = {"error": str(error)}
    json.dump(reported, sys.stdout)


if __name__ == "__main__":
    main()
