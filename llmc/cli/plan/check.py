"""`llmc plan check --server NAME CONFIG`: does what runs still fit today's traffic?"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from llmc.cli.grouped_help import GroupedCommand
from llmc.cli.options import option
from llmc.cli.output import echo
from llmc.cli.plan.serverflags import ServerFlags, takes_server_flags
from llmc.cli.quantities import fraction
from llmc.errors import InputError

DRIFTED = 4
"""Exit code where the traffic wastes or misses more than stated."""


def register(group: typer.Typer) -> None:
    """Add the command to `group`."""
    group.command("check", cls=GroupedCommand)(takes_server_flags(check))


def check(
    source: Annotated[
        str,
        typer.Argument(metavar="CONFIG", help="What the server runs with: a folder, file, command line, plan or log."),
    ],
    *,
    fail_above: Annotated[
        str, option("--fail-above", "F", "Exit with 4 above this padding, or share of steps without a graph.")
    ] = "15%",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of the report.")] = False,
    flags: ServerFlags,
) -> None:
    """Judge what a server runs with on today's traffic, and tell what a new plan of as many graphs would gain; where so
    few cannot do, one of as many as the server's own.

    For a cron job or CI: exit code 4 where a list's padding is more than --fail-above of its real work, or where more
    than that share of steps has no graph and would have one.

    \b
    Example:
      llmc plan check configuration --server vllm-gaudi --traffic yesterday.csv --fail-above 15%
    """
    from llmc.buckets.render.text import percent
    from llmc.integrations import report
    from llmc.integrations.evaluation import evaluate
    from llmc.integrations.tune import ServerBudget, ends, tune

    server, limit = flags.model(), fraction("--fail-above", fail_above) or 0.0
    loaded = flags.load(server, source)
    accepted = loaded.accepted(server)
    observed = flags.observe(server, loaded.setup, "judge the configuration")
    demands = observed.demands
    cost = flags.cost(server)
    now = evaluate(server, loaded.setup, accepted.lists, demands, cost)
    try:
        new = tune(server, loaded.setup, demands, ServerBudget(graphs=max(now.graphs, 1)), cost).chosen
    except InputError:  # so few graphs do not cover what the server's limits admit
        new = tune(server, loaded.setup, demands, ServerBudget(), cost).chosen
    drifted = now.worst > limit or now.missing - new.missing > limit
    notes = [*observed.notes, *report.accepted(source, accepted)]
    notes += report.ranges([(source, now)], ends(server, loaded.setup, {source: accepted.lists}, observed))
    if as_json:
        echo(json.dumps({"drifted": drifted, "limit": limit, "now": now.to_dict(), "planned_anew": new.to_dict(),
                               "notes": notes}))  # fmt: skip
    else:
        for note in notes:
            echo(note, err=True)
        echo(report.comparison([(source, now), ("planned anew", new)]), nl=False)
        said = f"padding {percent(now.worst)}, steps without a graph {percent(now.missing)}"
        gain = f"planned anew: {percent(new.worst)} and {percent(new.missing)}"
        echo(f"{'above the limit' if drifted else 'within the limit'}: {said}, limit {percent(limit)}; {gain}")
    if drifted:
        raise typer.Exit(DRIFTED)
