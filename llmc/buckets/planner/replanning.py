"""Estimated savings of a new plan on a server's recorded traffic, with at most as many graphs of each phase.

    python -m llmc.buckets.planner.replanning < {"plan": …, "metrics": …} > Offer.to_dict()

It runs in a process of its own, so planning does not block the server. `metrics` is a scrape of /metrics, whose length
histograms are the traffic; requests are drawn from them, so the results are estimates.
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
    """A better plan's estimated effect by phase, for `requests` requests.

    Padding is a share of real tokens (0.118 is 11.8%), `now` and with the `best` plan; `gain` is the saved share of
    padded tokens. `graphs` and `best_graphs` count the graphs of the two plans.
    """

    requests: int
    now: Mapping[str, float | None]
    best: Mapping[str, float | None]
    gain: Mapping[str, float]
    graphs: Mapping[str, int]
    best_graphs: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Return the offer as a JSON object."""
        return asdict(self)


def offer(plan: Plan, metrics: str) -> Offer | None:
    """Return the offer for a server of `plan` with this /metrics text; None before its first request. Raises
    InputError.
    """
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
    """Return the share of each phase's padded tokens that a plan saves, 0 … 1; negative where it pads more."""
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
    """Read the input on stdin and write the offer to stdout; errors are reported in "error"."""
    requested = json.load(sys.stdin)
    try:
        found = offer(Plan.from_json(json.dumps(requested["plan"])), requested["metrics"])
        reported: dict[str, Any] = {"offer": None if found is None else found.to_dict()}
    except LlmcError as error:
        reported = {"error": str(error)}
    json.dump(reported, sys.stdout)


if __name__ == "__main__":
    main()
