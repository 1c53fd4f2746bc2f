"""`llmc plan fleet`, or `llmc plan --fleet`: estimate a fleet's costs and simulate its cold starts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from llmc.cli import output
from llmc.cli.options import Command, argument, flag, switch
from llmc.cli.output import echo
from llmc.cli.quantities import duration
from llmc.errors import InputError
from llmc.settings import Settings

MOST_NODES = 100_000


@dataclass(frozen=True, kw_only=True)
class PlanFleetCommand(Command):
    """Estimate what a fleet will cost: compile hours, artifact sizes, memory per node and cold starts.

    Cold starts are simulated: up to 10,000 nodes pull a bundle at once through one registry, alone, helped by peers, or
    with a pre-pull. docs/planning.md describes the file and the model.

    \b
    Example:
      llmc plan --fleet fleet.yaml
      llmc plan --fleet fleet.yaml --max-cold-start 2m --plot fleet.html
      llmc plan --fleet fleet.yaml --nodes 50,500,5000 --json
    """

    file: str = argument("FILE", "Models, devices and replicas, as YAML or JSON.")
    max_cold_start: str | None = flag(
        None, "T", "Report from how many nodes on the p99 exceeds this. Default: the file's."
    )
    nodes: str | None = flag(None, "N,N…", "Node counts to simulate. Default: 10,100,1000,10000.")
    plot: Path | None = flag(None, "OUT", "Draw cold starts by node count: a .png, or a self-contained .html.")
    as_json: bool = switch("--json", "Print JSON instead of the report.")

    def run(self) -> None:
        from llmc.fleet.costs import cost_of
        from llmc.fleet.description import read
        from llmc.fleet.report import POINTS, plan_fleet

        bound, points = duration("--max-cold-start", self.max_cold_start), _points(self.nodes) or POINTS
        if bound == 0:
            raise InputError("--max-cold-start 0: every start takes longer; give a time above 0")
        described, settings = read(self.file), Settings.from_environment()
        if self.plot is not None:
            from llmc.buckets.render.page import check

            check(self.plot)
        costs = [cost_of(one, settings) for one in described.models]
        with output.StepProgress("simulate", after=2.0) as progress:
            found = plan_fleet(costs, described.network, bound or described.max_cold_start_s, points, progress)
        if self.plot is not None:
            from llmc.fleet.plot import draw

            draw(self.plot, found)
            echo(f"wrote {self.plot}", err=True)
        echo(json.dumps(found.to_dict()) if self.as_json else found.text(), nl=self.as_json)


def _points(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    words = text.split(",")
    if not all(word.strip().isdecimal() and 1 <= int(word) <= MOST_NODES for word in words):
        raise InputError(f"--nodes {text!r} is not a list of numbers from 1 to {MOST_NODES:,}, such as 100,1000")
    return tuple(sorted({int(word) for word in words}))
