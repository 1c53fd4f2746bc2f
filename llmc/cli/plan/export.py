"""`llmc plan export PLAN --server NAME`: a plan in the server's own form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.cli.grouped_help import GroupedCommand
from llmc.cli.options import option
from llmc.cli.output import echo
from llmc.cli.plan.serverflags import ServerFlags, takes_server_flags
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.integrations.base import Demands
    from llmc.integrations.evaluation import ServerEvaluation


def register(group: typer.Typer) -> None:
    """Add the command to `group`."""
    group.command("export", cls=GroupedCommand)(takes_server_flags(export))


def export(
    source: Annotated[
        str, typer.Argument(metavar="PLAN", help="A plan of llmc's, of llmc plan tune, or any configuration.")
    ],
    *,
    output: Annotated[
        Path | None, option("--output -o", "DIR", "Write environment, arguments, files and a report here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    flags: ServerFlags,
) -> None:
    """Print a plan in the server's own form, to paste; with -o, write it to a folder.

    The folder holds environment (NAME=VALUE a line), arguments (a flag a line), the server's own file where it reads
    one, kubernetes-env.yaml, and report.html: the numbers that justify it, with --traffic also of padding. A list that
    leaves steps of that traffic to be compiled while serving, or refused, is an error that names them.

    \b
    Example:
      llmc plan export plan.json --server vllm-gaudi -o configuration
      llmc plan export tuned.json --server vllm --traffic requests.csv
    """
    from llmc.integrations import report
    from llmc.integrations.configuration import as_text, write_folder
    from llmc.integrations.evaluation import evaluate
    from llmc.integrations.report import Findings, page

    server = flags.model()
    loaded = flags.load(server, source)
    accepted = loaded.accepted(server)
    if accepted.dropped:
        raise InputError("; ".join([*report.accepted(source, accepted), "mend the list, or the limits it is for"]))
    given = server.export(loaded.setup, loaded.lists)
    found: list[tuple[str, ServerEvaluation]] = []
    demands: Demands = {}
    if flags.traffic is not None:
        demands = flags.observe(server, loaded.setup, "judge the plan").demands
    for name, lists in ((report.OWN, server.default(loaded.setup)), ("exported", accepted.lists)):
        found.append((name, evaluate(server, loaded.setup, lists, demands, flags.cost(server))))
    if uncovered := report.uncovered(found[-1][1]):
        raise InputError(
            f"{source} leaves steps of {flags.traffic} without a graph: {uncovered}; plan for this traffic"
        )
    notes = report.accepted(source, accepted)
    if output is not None:
        names = write_folder(output, given, server.name, page(Findings(server, loaded.setup, found, given, notes)))
        echo(f"wrote {', '.join(names)} to {output}", err=True)
    if as_json:
        echo(json.dumps({"environment": dict(given.environment), "arguments": list(given.arguments),
                               "files": dict(given.files), "notes": notes,
                               "configurations": {name: one.to_dict() for name, one in found}}))  # fmt: skip
        return
    for note in notes:
        echo(note, err=True)
    if output is None:
        echo(as_text(given), nl=False)
    echo(report.comparison(found), nl=False, err=output is None)
