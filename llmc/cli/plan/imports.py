"""`llmc plan import SOURCE --server NAME`: what a server is started with, or printed, as a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmc.cli.grouped_help import GroupedCommand
from llmc.cli.options import option
from llmc.cli.output import echo
from llmc.cli.plan.serverflags import ServerFlags, takes_server_flags


def register(group: typer.Typer) -> None:
    """Add the command to `group`."""
    group.command("import", cls=GroupedCommand)(takes_server_flags(import_))


def import_(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="The server's own file, command line, variables, folder or log.")
    ],
    *,
    output: Annotated[
        Path | None, option("--output -o", "FILE", "Write the plan here in place of printing it.")
    ] = None,
    flags: ServerFlags,
) -> None:
    """Read a server's configuration, or the list that its log printed at start, as a plan in JSON.

    \b
    Example:
      llmc plan import server.log --server vllm-gaudi --max-model-len 8192 -o running.json
      llmc plan import command.sh --server vllm
    """
    from llmc.integrations import report
    from llmc.integrations.plan import ServerPlan

    server = flags.model()
    loaded = flags.load(server, source)
    accepted = loaded.accepted(server)
    for note in report.accepted(source, accepted):
        echo(note, err=True)
    plan = ServerPlan(server.name, loaded.setup, accepted.lists, f"read from {Path(source).name}")
    if output is None:
        echo(plan.to_json(), nl=False)
        return
    plan.save(output)
    echo(f"wrote {output}", err=True)
