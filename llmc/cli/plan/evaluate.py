"""`llmc plan evaluate`: replay traffic on llmc's plans, or on a server's by that server's rules."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.buckets.plan import Plan
from llmc.cli import output as output_bars
from llmc.cli.options import argument, flag, switch
from llmc.cli.output import echo
from llmc.cli.plan.make import draw_to
from llmc.cli.plan.servers import ServerFlags, command_line
from llmc.cli.planning import traffic_of
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.buckets.evaluation.replay import Evaluation
    from llmc.buckets.traffic.length_histogram import End
    from llmc.buckets.traffic.source import Traffic
    from llmc.integrations.base import BucketRules, Demands, Setup
    from llmc.integrations.evaluation import ServerEvaluation
    from llmc.integrations.observed import ObservedSteps


@dataclass(frozen=True, kw_only=True)
class PlanEvaluateCommand(ServerFlags):
    """Replay recorded requests on one or more plans and compare padding, bucket usage and uncovered steps.

    With --server, configurations of another server are judged by its own rules: its filters, its bucket lookup, and
    what it does with a step that no graph covers. They are also judged on parts of the traffic, halves or days, and on
    shifts of it: longer, shorter, closer and random.

    \b
    Example:
      llmc plan evaluate plan.json other.json --traffic requests.csv
      llmc plan evaluate buckets.txt --default --server vllm-gaudi --max-model-len 8192 --traffic requests.csv
    """

    files: list[str] | None = argument(
        "PLAN…",
        "Plans; with --server also exported folders, the server's own files, command lines or logs.",
        default=None,
    )
    bench: str | None = flag(None, "FILE", "Measured bucket times (llmc bench -o).")
    default: bool = switch("--default", "With --server: also judge the server's own default.")
    plot: Path | None = flag(
        None, "OUT", "Draw the result: a .png, or a self-contained .html; with --server only .html."
    )
    as_json: bool = switch("--json", "Print JSON instead of the report.")

    def run(self) -> None:
        if self.server is not None:
            if self.bench is not None:
                raise InputError("--bench times llmc's own buckets; leave it out with --server")
            self._of_server(self.files or [])
            return
        given = [f"--{name.replace('_', '-')}" for name in self.limits()]
        if given or self.default or self.settings:
            given += ["--default"] * self.default + ["--set"] * bool(self.settings)
            raise InputError(f"llmc plan evaluate replays traffic on finished plans; leave out {', '.join(given)}")
        if not self.files:
            raise InputError(
                "llmc plan evaluate needs PLAN files; for a model in a folder named evaluate, write ./evaluate"
            )
        self._own(self.files)

    def _own(self, files: list[str]) -> None:
        from llmc.buckets.report.text import comparison_text, evaluation_text, range_text

        plans = [(file, Plan.load(file)) for file in files]
        found = [(name, *self._replay(built)) for name, built in plans]
        output_bars.close_bars()
        if self.plot is not None:
            draw_to(self.plot, plans, self._traffic("draw") if self.traffic is not None else None, [])
        if self.as_json:
            documents = [
                {
                    "plan": name,
                    **evaluation.to_dict(),
                    "traffic": counts,
                    **({"padding_range": all_padding} if all_padding else {}),
                }
                for name, evaluation, counts, _, all_padding in found
            ]
            echo(json.dumps(documents[0] if len(documents) == 1 else {"plans": documents}))
            return
        for note in dict.fromkeys(note for one in found for note in one[3]):
            echo(note, err=True)
        if len(found) == 1:
            echo(evaluation_text(found[0][1]), nl=False)
        else:
            echo(comparison_text([(name, evaluation) for name, evaluation, *_ in found]), nl=False)
        for name, evaluation, _, _, all_padding in found:
            if all_padding:
                echo(range_text(name if len(found) > 1 else "", evaluation, all_padding), nl=False)

    def _replay(self, built: Plan) -> tuple[Evaluation, dict[str, int], list[str], dict[str, tuple[float, float]]]:
        """The evaluation, the traffic's counts and notes, and the padding ranges if lengths are uncertain."""
        from llmc.buckets.evaluation.replay import padding_ranges, replay
        from llmc.buckets.traffic.length_histogram import LOW_AND_HIGH

        traffic = self._traffic("judge the plan")
        found = replay(built, traffic)
        ends = [self._traffic("judge the plan", end) for end in LOW_AND_HIGH] if traffic.uncertain else []
        return found, traffic.counts(), traffic.notes(), padding_ranges(built, found, ends)

    def _traffic(self, then: str, end: End = "middle") -> Traffic:
        return traffic_of(
            self.traffic, then, end, format_=self.traffic_format, names=self.fields, arrival_rate=self.arrival_rate,
            clip=self.clip, bench=self.bench,
        )  # fmt: skip

    def _of_server(self, sources: list[str]) -> None:
        """Judge every configuration on the steps that its own limits and settings make of the traffic."""
        from llmc.files import write_text
        from llmc.integrations import report
        from llmc.integrations.base import Export, Setup
        from llmc.integrations.evaluation import evaluate as judge
        from llmc.integrations.report import Findings, page
        from llmc.integrations.tune import ends

        server = self.model()
        if not sources and not self.default:
            raise InputError("name the configurations to judge, or add --default for the server's own")
        if self.plot is not None and self.plot.suffix.lower() != ".html":
            raise InputError(f"cannot draw to {self.plot}: with --server, give a file name that ends in .html")
        loaded = [self.load(server, source) for source in sources]
        setups = [one.setup for one in loaded] or [self.setup(server)]
        if any(one.limits != setups[0].limits for one in setups):
            raise InputError("the configurations have different limits; judge each by itself")
        judged = [(report.OWN, setups[0], server.default(setups[0]))] if self.default else []
        notes: list[str] = []
        for one in loaded:
            accepted = one.accepted(server)
            notes += report.accepted(one.name, accepted)
            judged.append((one.name, one.setup, accepted.lists))
        seen: dict[str, ObservedSteps] = {}
        cost = self.cost(server)
        found = []
        others: dict[str, list[tuple[str, ServerEvaluation]]] = {}
        shifts: dict[str, dict[str, Demands]] = {}
        for name, setup, lists in judged:
            if (key := repr(setup)) not in seen:
                seen[key] = self.observe(server, setup, "judge the configurations")
                shifts[key] = self._others(server, setup, seen[key])
            observed = seen[key]
            for shift, demands in shifts[key].items():
                others.setdefault(shift, []).append((name, judge(server, setup, lists, demands, cost)))
            found.append((name, judge(server, setup, lists, observed.demands, cost)))
            notes += [*observed.notes, *report.ranges(found[-1:], ends(server, setup, {name: lists}, observed))]
        notes = list(dict.fromkeys(notes))
        same = {name: value for name, value in setups[0].own.items() if all(one.own[name] == value for one in setups)}
        setup = Setup(setups[0].limits, same)
        if self.plot is not None:
            origin = report.origin(server, observed.facts, command_line())
            write_text(self.plot, page(Findings(server, setup, found, Export(), notes, origin, others)), "report")
            echo(f"wrote {self.plot}", err=True)
        if self.as_json:
            echo(json.dumps({"server": server.name, "configurations": {name: one.to_dict() for name, one in found},
                                   "other_traffic": report.others_json(others),
                                   "traffic": dict(observed.counts), "notes": notes}))  # fmt: skip
            return
        for note in notes:
            echo(note, err=True)
        echo(report.comparison(found), nl=False)
        echo("\n" + report.others_text(others), nl=False)

    def _others(self, server: BucketRules, setup: Setup, observed: ObservedSteps) -> dict[str, Demands]:
        """The steps of parts of the traffic, and of shifts of it, by name."""
        from llmc.buckets.traffic.step_time import AssumedStepTime
        from llmc.integrations.observed import parts
        from llmc.integrations.shifts import shifted

        found = parts(server, setup, self.recorded("judge parts of the traffic"), observed)
        output_bars.close_bars()
        shifts = shifted(server, setup, observed.requests, AssumedStepTime())
        return {**{part.name: part.demands for part in found}, **shifts}
