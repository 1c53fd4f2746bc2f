"""`llmc plan tune --server NAME`: from recorded requests to the configuration to paste."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from llmc.cli.grouped_help import GroupedCommand
from llmc.cli.options import option
from llmc.cli.output import echo
from llmc.cli.plan.serverflags import ServerFlags, takes_server_flags
from llmc.cli.quantities import duration, size

TUNED = "tuned"


def register(group: typer.Typer) -> None:
    """Add the command to `group`."""
    group.command("tune", cls=GroupedCommand)(takes_server_flags(tune))


def tune(
    *,
    max_graphs: Annotated[
        int | None, option("--max-graphs", "N", "Graphs at start. Default: as many as the server's own.", min=1)
    ] = None,
    max_warmup: Annotated[str | None, option("--max-warmup", "T", "Warm-up time at most, e.g. 10m.")] = None,
    max_graph_memory: Annotated[
        str | None, option("--max-graph-memory", "SIZE", "Memory of all graphs at most, e.g. 8GiB.")
    ] = None,
    judge: Annotated[
        str | None, option("--judge", "FILE", "Other recorded requests, to judge both configurations on too.")
    ] = None,
    output: Annotated[
        Path | None, option("--output -o", "DIR", "Write the configuration here: see llmc plan export.")
    ] = None,
    save: Annotated[Path | None, option("--save", "FILE", "Write the plan here, as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of the report.")] = False,
    flags: ServerFlags,
) -> None:
    """Choose the graphs that pad recorded requests least, under the server's own rules, and write its configuration.

    Without a bound, it prepares as many graphs as the server would by itself.

    \b
    Example:
      llmc plan tune --server vllm --traffic requests.csv --max-model-len 8192 --max-num-seqs 128 -o configuration
      llmc plan tune --server vllm-gaudi --traffic requests.csv --max-model-len 8192 --max-num-seqs 32 --max-warmup 20m
    """
    from llmc.integrations import report
    from llmc.integrations.configuration import as_text, write_folder
    from llmc.integrations.evaluation import evaluate
    from llmc.integrations.report import Findings, page
    from llmc.integrations.tune import ServerBudget, ends
    from llmc.integrations.tune import tune as choose

    server = flags.model()
    setup, cost = flags.setup(server), flags.cost(server)
    budget = ServerBudget(
        max_graphs, duration("--max-warmup", max_warmup), size("--max-graph-memory", max_graph_memory)
    )
    observed = flags.observe(server, setup, "choose graphs")
    tuned = choose(server, setup, observed.demands, budget, cost, facts=observed.facts)
    plan = tuned.plan
    found = [(report.OWN, tuned.default), (TUNED, tuned.chosen)]
    notes = [
        *observed.notes,
        *report.ranges(found, ends(server, setup, {report.OWN: tuned.default_lists, TUNED: plan.lists}, observed)),
    ]
    if judge is not None:
        other = flags.observe(server, setup, "judge", judge)
        for name, lists in ((report.OWN, tuned.default_lists), (TUNED, plan.lists)):
            found.append((f"{name}, on {Path(judge).name}", evaluate(server, setup, lists, other.demands, cost)))
    given = server.export(setup, plan.lists)
    if save is not None:
        plan.save(save)
        echo(f"wrote {save}", err=True)
    if output is not None:
        names = write_folder(output, given, server.name, page(Findings(server, setup, found, given, notes)))
        echo(f"wrote {', '.join(names)} to {output}", err=True)
    if as_json:
        echo(json.dumps({"plan": plan.to_dict(), "configurations": {name: one.to_dict() for name, one in found},
                               "environment": dict(given.environment), "arguments": list(given.arguments),
                               "files": dict(given.files), "notes": notes}))  # fmt: skip
        return
    for note in notes:
        echo(note, err=True)
    echo(report.comparison(found), nl=False)
    if output is None:
        echo("\n" + as_text(given), nl=False)
