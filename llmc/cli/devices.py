"""`llmc devices`: what this host can compile for and run on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("devices")(devices)


def devices(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the devices, with what is missing here for each and the line that installs it, and the known TPU slices.

    \b
    Example:
      llmc devices
      llmc devices --json
    """
    from llmc.compiler.pipeline.survey import survey

    found = survey()
    if as_json:
        typer.echo(json.dumps(found))
        return
    header = ("device", "compiles here", "runs here", "executables", "note")
    _print(header, [(d["device"], d["compiles"], d["runs"], d["state"], d["note"]) for d in found])
    for device in found:
        if device["topologies"]:
            typer.echo(f"\n--device {device['device']}:GENERATION-SHAPE, for example tpu:v5e-2x2")
            _print(("generation", "memory a device", "devices a chip", "shapes"), _generations(device["topologies"]))


def _generations(topologies: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for name, group in groupby(topologies, key=lambda t: t["generation"]):
        slices = list(group)
        first = slices[0]
        memory = f"{first['hbm_bytes_per_device'] / (1 << 30):.2f} GiB"
        yield name, memory, str(first["devices"] // first["chips"]), " ".join(t["shape"] for t in slices)


def _print(header: tuple[str, ...], rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> None:
    table = [header, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    for row in table:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
