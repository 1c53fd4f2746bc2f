"""`llmc plan evaluate` replays traffic on plans as they are: llmc's own, or a server's by that server's rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.buckets.plan import Plan
from llmc.cli import output as output_bars
from llmc.cli.grouped_help import GroupedCommand
from llmc.cli.options import option
from llmc.cli.output import echo
from llmc.cli.plan.printing import draw_to
from llmc.cli.plan.serverflags import ServerFlags, takes_server_flags
from llmc.cli.planning import PlanningFlags, open_traffic
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.buckets.evaluation.replay import Evaluation
    from llmc.integrations.observed import ObservedSteps


def register(group: typer.Typer) -> None:
    """Add the command to `group`."""
    group.command("evaluate", cls=GroupedCommand)(takes_server_flags(evaluate))


def evaluate(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PLAN…",
            help="Plans; with --server also folders that llmc exported, the server's own files, command lines, logs.",
            show_default=False,
        ),
    ] = None,
    *,
    bench: Annotated[str | None, option("--bench", "FILE", "Measured seconds of buckets (llmc bench -o).")] = None,
    default: Annotated[
        bool, typer.Option("--default", help="With --server: also what the server would prepare by itself.")
    ] = False,
    plot: Annotated[
        Path | None, option("--plot", "OUT", "Draw it: a .png, or a self-contained .html; with --server .html.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of the report.")] = False,
    flags: ServerFlags,
) -> None:
    """Replay recorded requests on plans, several side by side: padding, use of each bucket, what is not covered.

    With --server by that server's rules: its filters, its look-up, what it does with a step that no graph covers.

    \b
    Example:
      llmc plan evaluate plan.json other.json --traffic requests.csv
      llmc plan evaluate buckets.txt --default --server vllm-gaudi --max-model-len 8192 --traffic requests.csv
    """
    if flags.server is not None:
        if bench is not None:
            raise InputError("--bench times llmc's own buckets; leave it out with --server")
        _servers(files or [], flags, default, plot, as_json=as_json)
        return
    given = [f"--{name.replace('_', '-')}" for name in flags.limits()]
    if given or default or flags.settings:
        given += ["--default"] * default + ["--set"] * bool(flags.settings)
        raise InputError(f"llmc plan evaluate replays traffic on plans as they are; leave out {', '.join(given)}")
    if not files:
        raise InputError(
            "llmc plan evaluate takes PLAN files; to plan for a model in a folder evaluate, name ./evaluate"
        )
    replayed = PlanningFlags(
        traffic=flags.traffic, traffic_format=flags.traffic_format, fields=flags.fields,
        arrival_rate=flags.arrival_rate, clip=flags.clip, bench=bench,
    )  # fmt: skip
    _own(files, replayed, plot, as_json=as_json)


def _own(files: list[str], flags: PlanningFlags, plot: Path | None, *, as_json: bool) -> None:
    from llmc.buckets.report.text import comparison_text, evaluation_text, range_text

    plans = [(file, Plan.load(file)) for file in files]
    found = [(name, *_replay(made, flags)) for name, made in plans]
    output_bars.close_bars()
    if plot is not None:
        draw_to(plot, plans, open_traffic(flags, "draw") if flags.traffic is not None else None, [])
    if as_json:
        documents = [
            {"plan": name, **evaluation.to_dict(), "traffic": counts, **({"waste_range": wastes} if wastes else {})}
            for name, evaluation, counts, _, wastes in found
        ]
        echo(json.dumps(documents[0] if len(documents) == 1 else {"plans": documents}))
        return
    for note in dict.fromkeys(note for one in found for note in one[3]):
        echo(note, err=True)
    if len(found) == 1:
        echo(evaluation_text(found[0][1]), nl=False)
    else:
        echo(comparison_text([(name, evaluation) for name, evaluation, *_ in found]), nl=False)
    for name, evaluation, _, _, wastes in found:
        if wastes:
            echo(range_text(name if len(found) > 1 else "", evaluation, wastes), nl=False)


def _replay(
    made: Plan, flags: PlanningFlags
) -> tuple[Evaluation, dict[str, int], list[str], dict[str, tuple[float, float]]]:
    """What the plan does, counts and notes of the traffic, and where lengths are uncertain the range of each waste."""
    from llmc.buckets.evaluation.replay import replay, waste_ranges
    from llmc.buckets.traffic.length_histogram import OUTER

    traffic = open_traffic(flags, "judge the plan")
    found = replay(made, traffic)
    ends = [open_traffic(flags, "judge the plan", end) for end in OUTER] if traffic.uncertain else []
    return found, traffic.counts(), traffic.notes(), waste_ranges(made, found, ends)


def _servers(sources: list[str], flags: ServerFlags, default: bool, plot: Path | None, *, as_json: bool) -> None:
    """Every configuration on the steps that its own limits and settings make of the traffic."""
    from llmc.files import write_text
    from llmc.integrations import report
    from llmc.integrations.base import Export, Setup
    from llmc.integrations.evaluation import evaluate as judge
    from llmc.integrations.report import Findings, page
    from llmc.integrations.tune import ends

    server = flags.model()
    if not sources and not default:
        raise InputError("name the configurations to judge, or --default for what the server would prepare by itself")
    if plot is not None and plot.suffix.lower() != ".html":
        raise InputError(f"cannot draw to {plot}: with --server, give a file name that ends in .html")
    loaded = [flags.load(server, source) for source in sources]
    setups = [one.setup for one in loaded] or [flags.setup(server)]
    if any(one.limits != setups[0].limits for one in setups):
        raise InputError("the configurations are of different limits; judge each by itself")
    judged = [(report.OWN, setups[0], server.default(setups[0]))] if default else []
    notes: list[str] = []
    for one in loaded:
        accepted = one.accepted(server)
        notes += report.accepted(one.name, accepted)
        judged.append((one.name, one.setup, accepted.lists))
    seen: dict[str, ObservedSteps] = {}
    cost = flags.cost(server)
    found = []
    for name, setup, lists in judged:
        if (key := repr(setup)) not in seen:
            seen[key] = flags.observe(server, setup, "judge the configurations")
        observed = seen[key]
        found.append((name, judge(server, setup, lists, observed.demands, cost)))
        notes += [*observed.notes, *report.ranges(found[-1:], ends(server, setup, {name: lists}, observed))]
    notes = list(dict.fromkeys(notes))
    same = {name: value for name, value in setups[0].own.items() if all(one.own[name] == value for one in setups)}
    setup = Setup(setups[0].limits, same)
    if plot is not None:
        write_text(plot, page(Findings(server, setup, found, Export(), notes)), "report")
        echo(f"wrote {plot}", err=True)
    if as_json:
        echo(json.dumps({"server": server.name, "configurations": {name: one.to_dict() for name, one in found},
                               "traffic": dict(observed.counts), "notes": notes}))  # fmt: skip
        return
    for note in notes:
        echo(note, err=True)
    echo(report.comparison(found), nl=False)
