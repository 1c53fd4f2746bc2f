"""`llmc devices`: what this host can compile for and run on."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("devices")(devices)


def devices(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the devices, with what is missing here for each and the line that installs it.

    \b
    Example:
      llmc devices
      llmc devices --json
    """
    from llmc.compiler.survey import survey

    found = survey()
    if as_json:
        typer.echo(json.dumps(found))
        return
    header = ("device", "compiles here", "runs here", "executables", "note")
    table = [header, *((d["device"], d["compiles"], d["runs"], d["state"], d["note"]) for d in found)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    for row in table:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
