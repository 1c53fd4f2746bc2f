"""`llmc plan evaluate|export|import|tune|check`: judge plans, and make them for other servers."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from llmc.buckets.plan import Plan
from llmc.cli import output
from llmc.cli.options import (
    Command,
    argument,
    clip_flag,
    duration,
    fields_flag,
    flag,
    fraction,
    rate,
    rate_flag,
    size,
    switch,
    traffic_format_flag,
)
from llmc.cli.output import ReadingProgress, StepProgress, close_bars, echo, print_table
from llmc.cli.plan.make import draw_to
from llmc.cli.planning import not_a_file, traffic_of
from llmc.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmc.buckets.evaluation.replay import Evaluation
    from llmc.buckets.plan import Fact
    from llmc.buckets.traffic.length_histogram import End
    from llmc.buckets.traffic.source import Traffic
    from llmc.integrations.base import BucketRules, Demands, GraphCost, Setup
    from llmc.integrations.configuration import Configuration
    from llmc.integrations.evaluation import ServerEvaluation
    from llmc.integrations.observed import ObservedSteps, TrafficSource
    from llmc.integrations.report import Findings
    from llmc.integrations.settings import Value


LIMITS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "max_prompt_len")


def _known() -> str:
    from llmc.integrations import BUCKETS

    return ", ".join(BUCKETS.names())


@dataclass(frozen=True, kw_only=True)
class ServerFlags(Command):
    """Flags for planning with another server's rules; None means not given."""

    server: str | None = flag(None, "NAME", f"The server, for vllm optionally with a release (vllm@0.24): {_known()}.")
    max_model_len: int | None = flag(None, "N", "Longest sequence in tokens, as configured in the server.")
    max_num_seqs: int | None = flag(None, "N", "Sequences in flight. Default: the server's.")
    max_num_batched_tokens: int | None = flag(None, "N", "Most tokens per step. Default: the server's.")
    block_size: int | None = flag(None, "N", "Tokens per KV cache block. Default: the server's.")
    max_prompt_len: int | None = flag(None, "N", "Longest prompt in tokens. Default: what --max-model-len allows.")
    settings: list[str] | None = flag(
        None, "NAME=VALUE", "A server-specific setting; --set '?' lists them. Repeatable.", names="--set"
    )
    traffic: str | None = flag(None, "FILE", "Recorded requests (docs/planning.md).")
    traffic_format: str | None = traffic_format_flag()
    fields: str | None = fields_flag()
    arrival_rate: str | None = rate_flag()
    clip: bool = clip_flag()
    graph_seconds: str | None = flag(None, "T", "Start-up time per graph. Default: the published value.")
    graph_bytes: str | None = flag(None, "SIZE", "Device memory per graph. Default: the published value.")

    def model(self) -> BucketRules:
        """The server's rules; --set ? prints its settings and exits. Raises InputError without a known name."""
        from llmc.integrations import bucket_rules, released

        if self.server is None:
            raise InputError(f"name the server with --server NAME: {_known()}")
        found = bucket_rules(released(self.server)[0])
        if "?" in (self.settings or []):
            rows = [(one.name, "" if one.spelling == one.name else one.spelling, one.help) for one in found.settings]
            print_table(("--set NAME", "the server's own name", "meaning"), rows)
            raise typer.Exit
        return found

    def limits(self) -> dict[str, int]:
        """The given limits by name."""
        return {name: value for name in LIMITS if (value := getattr(self, name)) is not None}

    def own(self, server: BucketRules) -> dict[str, Value]:
        """The given server-specific settings. Raises InputError for an unknown one."""
        from llmc.integrations import released

        known = {setting.name: setting for setting in server.settings}
        found = released(self.server or "")[1]
        for text in self.settings or []:
            name, equals, value = text.partition("=")
            name = name.strip("-").replace("-", "_")
            if name not in known:
                raise UnknownNameError(f"setting of {server.name}", name, known)
            if not equals:
                raise InputError(f"--set {text} has no value; write --set {name}=VALUE")
            found[name] = known[name].parse(value)
        return found

    def setup(self, server: BucketRules) -> Setup:
        """The server's setup. Raises InputError if --max-model-len is missing."""
        from llmc.integrations.configuration import setup_for

        return setup_for(server, self.limits(), self.own(server))

    def load(self, server: BucketRules, source: str) -> Configuration:
        """Read the configuration at `source`. Raises what configuration.load raises."""
        from llmc.integrations.configuration import load

        return load(server, source, self.limits(), self.own(server))

    def cost(self, server: BucketRules) -> GraphCost:
        """The cost of a graph at start: the given values, else the published ones."""
        from dataclasses import replace

        seconds, held = duration("--graph-seconds", self.graph_seconds), size("--graph-bytes", self.graph_bytes)
        return replace(
            server.cost,
            seconds=server.cost.seconds if seconds is None else seconds,
            size=server.cost.size if held is None else held,
        )

    def recorded(self, then: str, path: str | None = None) -> TrafficSource:
        """The traffic in `path`, else --traffic. Its progress bar ends with `then`, the next activity."""
        from llmc.buckets.traffic.formats.fields import parse
        from llmc.buckets.traffic.formats.prometheus.live import is_url
        from llmc.integrations.observed import TrafficSource

        path = path or self.traffic
        if path is None:
            raise InputError("name the recorded requests with --traffic FILE")
        if is_url(path):
            raise InputError(not_a_file(path))
        return TrafficSource(
            path, rate("--arrival-rate", self.arrival_rate), self.clip, self.traffic_format,
            None if self.fields is None else parse(self.fields), ReadingProgress(f"replay {path}", then),
        )  # fmt: skip

    def observe(self, server: BucketRules, setup: Setup, then: str, path: str | None = None) -> ObservedSteps:
        """The steps for the traffic of `recorded`."""
        from llmc.integrations.observed import observe

        found = observe(server, setup, self.recorded(then, path))
        close_bars()
        return found


@dataclass(frozen=True, kw_only=True)
class PlanExportCommand(ServerFlags):
    """Print a plan in another server's format, ready to paste; with -o, write it to a folder.

    The folder holds environment (one NAME=VALUE a line), arguments (one flag a line), the server's own file if it reads
    one, kubernetes-env.yaml, and report.html with the numbers behind the plan. With --traffic the report includes
    padding, and a plan that leaves steps of that traffic without a graph is an error.

    \b
    Example:
      llmc plan export plan.json --server vllm-gaudi -o configuration
      llmc plan export tuned.json --server vllm --traffic requests.csv
    """

    source: str = argument("PLAN", "A plan of llmc plan or llmc plan tune, or any configuration.")
    output: Path | None = flag(
        None, "DIR", "Write environment, arguments, files and a report here.", names="--output -o"
    )
    as_json: bool = switch("--json", "Print JSON.")

    def run(self) -> None:
        from llmc.integrations import report
        from llmc.integrations.configuration import as_text
        from llmc.integrations.evaluation import evaluate
        from llmc.integrations.report import Findings

        server = self.model()
        loaded = self.load(server, self.source)
        accepted = loaded.accepted(server)
        if accepted.dropped:
            raise InputError("; ".join([*report.accepted(self.source, accepted), "correct the list or the limits"]))
        given = server.export(loaded.setup, loaded.lists)
        found: list[tuple[str, ServerEvaluation]] = []
        demands: Demands = {}
        facts: Mapping[str, Fact] = {}
        if self.traffic is not None:
            observed = self.observe(server, loaded.setup, "judge the plan")
            demands, facts = observed.demands, observed.facts
        for name, lists in ((report.OWN, server.default(loaded.setup)), ("exported", accepted.lists)):
            found.append((name, evaluate(server, loaded.setup, lists, demands, self.cost(server))))
        if uncovered := report.uncovered(found[-1][1]):
            raise InputError(
                f"{self.source} leaves steps of {self.traffic} without a graph: {uncovered}; plan for this traffic"
            )
        notes = report.accepted(self.source, accepted)
        if self.output is not None:
            origin = report.origin(server, facts, command_line())
            _write(self.output, Findings(server, loaded.setup, found, given, notes, origin))
        if self.as_json:
            echo(json.dumps({"environment": dict(given.environment), "arguments": list(given.arguments),
                                   "files": dict(given.files), "notes": notes,
                                   "configurations": {name: one.to_dict() for name, one in found}}))  # fmt: skip
            return
        for note in notes:
            echo(note, err=True)
        if self.output is None:
            echo(as_text(given), nl=False, verbatim=True)
        echo(report.comparison(found), nl=False, err=self.output is None)


@dataclass(frozen=True, kw_only=True)
class PlanImportCommand(ServerFlags):
    """Convert another server's configuration, or the bucket list in its start-up log, to a plan in JSON.

    \b
    Example:
      llmc plan import server.log --server vllm-gaudi --max-model-len 8192 -o running.json
      llmc plan import command.sh --server vllm
    """

    source: str = argument("SOURCE", "The server's own file, command line, variables, folder or log.")
    output: Path | None = flag(None, "FILE", "Write the plan here instead of printing it.", names="--output -o")

    def run(self) -> None:
        from llmc.integrations import report
        from llmc.integrations.plan import ServerPlan

        server = self.model()
        loaded = self.load(server, self.source)
        accepted = loaded.accepted(server)
        for note in report.accepted(self.source, accepted):
            echo(note, err=True)
        plan = ServerPlan(server.name, loaded.setup, accepted.lists, f"read from {Path(self.source).name}")
        if self.output is None:
            echo(plan.to_json(), nl=False)
            return
        plan.save(self.output)
        echo(f"wrote {self.output}", err=True)


TUNED = "tuned"


@dataclass(frozen=True, kw_only=True)
class PlanTuneCommand(ServerFlags):
    """Choose the graphs that pad recorded requests least, by another server's own rules, and write its configuration.

    By default it uses as many graphs as the server would prepare by itself. The report also says how much both pad on
    the half of the traffic that a plan did not see, and on shifts of it: longer, shorter, closer and random.

    \b
    Example:
      llmc plan tune --server vllm --traffic requests.csv --max-model-len 8192 --max-num-seqs 128 -o configuration
      llmc plan tune --server vllm-gaudi --traffic requests.csv --max-model-len 8192 --max-num-seqs 32 --max-warmup 20m
    """

    max_graphs: int | None = flag(None, "N", "Most graphs. Default: as many as the server's own.", min=1)
    max_warmup: str | None = flag(None, "T", "Longest warm-up, e.g. 10m.")
    max_graph_memory: str | None = flag(None, "SIZE", "Most memory for all graphs, e.g. 8GiB.")
    judge: str | None = flag(None, "FILE", "Other recorded requests, to also judge both configurations on.")
    hedge: str | None = flag(
        None, "SHARE",
        "Weight of other traffic in the plan, 0 to below 1. Default: enough to pad no shift of this traffic more than "
        "the server's own graphs do, for at most 2 points.",
    )  # fmt: skip
    output: Path | None = flag(None, "DIR", "Write the configuration here (llmc plan export).", names="--output -o")
    save: Path | None = flag(None, "FILE", "Write the plan here, as JSON.")
    as_json: bool = switch("--json", "Print JSON instead of the report.")

    def run(self) -> None:
        from llmc.integrations import report
        from llmc.integrations.configuration import as_text
        from llmc.integrations.observed import MOST_KEPT
        from llmc.integrations.report import Findings
        from llmc.integrations.tune import HEDGES, ServerBudget, ends, tune_on

        server = self.model()
        setup, cost = self.setup(server), self.cost(server)
        budget = ServerBudget(
            self.max_graphs,
            duration("--max-warmup", self.max_warmup),
            size("--max-graph-memory", self.max_graph_memory),
        )
        hedge = fraction("--hedge", self.hedge)
        observed = self.observe(server, setup, "choose graphs")
        with StepProgress("choose graphs", hidden=not sys.stderr.isatty(), after=2.0) as progress:
            steps, most = count(), 2 * (HEDGES if hedge is None else 2)
            tuned = tune_on(server, setup, self.recorded("judge on the rest"), observed, budget, cost, hedge,
                            lambda: progress("choose graphs", min(next(steps), most), most))  # fmt: skip
        close_bars()
        plan = tuned.plan
        found = [(report.OWN, tuned.default), (TUNED, tuned.chosen)]
        others = {f"{name} (held out)": _named(pair) for name, pair in tuned.held_out.items()}
        others |= {name: _named(pair) for name, pair in tuned.shifts.items()}
        notes = [
            *observed.notes,
            *report.ranges(found, ends(server, setup, {report.OWN: tuned.default_lists, TUNED: plan.lists}, observed)),
            *report.hedge_text(tuned),
        ]
        if observed.counts.get("admitted", 0) > MOST_KEPT:
            notes.append(f"lengths and arrivals are shifted for the first {MOST_KEPT:,} requests only")
        if self.judge is not None:
            other = self.observe(server, setup, "judge", self.judge)
            others = {Path(self.judge).name: _named(tuned.on(server, other.demands, cost)), **others}
        given = server.export(setup, plan.lists)
        if self.save is not None:
            plan.save(self.save)
            echo(f"wrote {self.save}", err=True)
        if self.output is not None:
            origin = report.origin(server, observed.facts, command_line())
            _write(self.output, Findings(server, setup, found, given, notes, origin, others))
        if self.as_json:
            echo(json.dumps({
                "plan": plan.to_dict(), "configurations": {name: one.to_dict() for name, one in found},
                "other_traffic": report.others_json(others),
                "hedge": {"weights": tuned.weights, "price": tuned.price, "worse": tuned.worse},
                "environment": dict(given.environment), "arguments": list(given.arguments),
                "files": dict(given.files), "notes": notes,
            }))  # fmt: skip
            return
        for note in notes:
            echo(note, err=True)
        echo(report.comparison(found), nl=False)
        echo("\n" + report.others_text(others), nl=False)
        if self.output is None:
            echo("\n" + as_text(given), nl=False)


def _write(folder: Path, findings: Findings) -> None:
    from llmc.integrations.configuration import write_folder
    from llmc.integrations.report import page

    origin = [": ".join(one) for one in findings.origin]
    names = write_folder(folder, findings.export, findings.server.name, page(findings), origin)
    echo(f"wrote {', '.join(names)} to {folder}", err=True)


def _named(pair: tuple[ServerEvaluation, ServerEvaluation]) -> list[tuple[str, ServerEvaluation]]:
    from llmc.integrations import report

    return list(zip((report.OWN, TUNED), pair, strict=True))


def command_line() -> str:
    """The command line, its absolute paths without their folders."""

    def shown(word: str) -> str:
        flag, equals, value = word.rpartition("=")
        return f"{flag}{equals}{Path(value).name}" if value.startswith("/") else word

    return shlex.join(["llmc", *map(shown, output.command)])


DRIFTED = 4
"""Exit code if padding, or the share of steps without a graph, exceeds the limit."""


@dataclass(frozen=True, kw_only=True)
class PlanCheckCommand(ServerFlags):
    """Check whether a server's graphs still fit its traffic, and report what a new plan would gain.

    For cron jobs and CI. Exit status 4: padding exceeds --fail-above of the real work, or more than that share of steps
    lacks a graph that a new plan would have. The new plan has as many graphs as now, or as the server's default if so
    few cannot cover its limits.

    \b
    Example:
      llmc plan check configuration --server vllm-gaudi --traffic yesterday.csv --fail-above 15%
    """

    source: str = argument("CONFIG", "The server's configuration: a folder, file, command line, plan or log.")
    fail_above: str = flag("15%", "F", "Largest padding, or share of steps without a graph, that passes.")
    as_json: bool = switch("--json", "Print JSON instead of the report.")

    def run(self) -> None:
        from llmc.buckets.render.text import percent
        from llmc.integrations import report
        from llmc.integrations.evaluation import evaluate
        from llmc.integrations.tune import ServerBudget, ends, tune

        server, limit = self.model(), fraction("--fail-above", self.fail_above) or 0.0
        loaded = self.load(server, self.source)
        accepted = loaded.accepted(server)
        observed = self.observe(server, loaded.setup, "judge the configuration")
        demands = observed.demands
        cost = self.cost(server)
        now = evaluate(server, loaded.setup, accepted.lists, demands, cost)
        try:
            new = tune(server, loaded.setup, demands, ServerBudget(graphs=max(now.graphs, 1)), cost).chosen
        except InputError:  # so few graphs do not cover what the server's limits admit
            new = tune(server, loaded.setup, demands, ServerBudget(), cost).chosen
        drifted = now.worst > limit or now.missing - new.missing > limit
        notes = [*observed.notes, *report.accepted(self.source, accepted)]
        notes += report.ranges(
            [(self.source, now)], ends(server, loaded.setup, {self.source: accepted.lists}, observed)
        )
        if self.as_json:
            echo(json.dumps({"drifted": drifted, "limit": limit, "now": now.to_dict(), "planned_anew": new.to_dict(),
                                   "notes": notes}))  # fmt: skip
        else:
            for note in notes:
                echo(note, err=True)
            echo(report.comparison([(self.source, now), ("planned anew", new)]), nl=False)
            said = f"padding {percent(now.worst)}, steps without a graph {percent(now.missing)}"
            gain = f"planned anew: {percent(new.worst)} and {percent(new.missing)}"
            echo(f"{'above the limit' if drifted else 'within the limit'}: {said}, limit {percent(limit)}; {gain}")
        if drifted:
            raise typer.Exit(DRIFTED)


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
        close_bars()
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
        """The evaluation, the traffic's counts and notes, and padding ranges if lengths are uncertain."""
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
        from llmc.buckets.traffic.step_time import AssumedStepTime
        from llmc.integrations.observed import parts
        from llmc.integrations.shifts import shifted

        found = parts(server, setup, self.recorded("judge parts of the traffic"), observed)
        close_bars()
        shifts = shifted(server, setup, observed.requests, AssumedStepTime())
        return {**{part.name: part.demands for part in found}, **shifts}
