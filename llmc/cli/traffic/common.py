"""Shared by the commands of `llmc traffic`: flags, the opening of a trace, and what is said of a recording."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.cli.options import option
from llmc.cli.output import ReadingProgress, close_bars, echo
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.buckets.traffic.formats.base import Fields
    from llmc.buckets.traffic.reader import Trace

FormatFlag = Annotated[
    str | None,
    option("--traffic-format", "NAME", "What it is written in. Default: as its beginning looks.", show_default=False),
]
FieldsFlag = Annotated[
    str | None,
    option(
        "--fields",
        "prompt=A,output=B[,time=C][,cached=D]",
        "What the fields of its lines are called.",
        show_default=False,
    ),
]
OutputFlag = Annotated[Path, option("--output -o", "OUT", "Where to write it: JSON lines, .gz to compress them.")]
SeedFlag = Annotated[int, option("--seed", "N", "What is drawn: the same seed draws the same.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def fields_of(text: str | None) -> Fields:
    """What --fields names; nothing without it."""
    from llmc.buckets.traffic.formats.fields import parse

    return {} if text is None else parse(text)


def open_trace(file: str, format_: str | None, fields: str | None, doing: str) -> Trace:
    """The requests of a file, with a bar that says what is `doing`. Refuses a file of histograms, and a URL."""
    from llmc.buckets.traffic.formats.prometheus.live import is_url
    from llmc.buckets.traffic.reader import Trace

    if is_url(file):
        raise InputError(
            f"{file}: is no file of requests; sample it with llmc traffic show {file} --for 10m -o OUT.prom"
        )
    bar = ReadingProgress(f"{doing} {file}", "finish")
    trace: Trace = Trace(
        file, format=format_, fields=fields_of(fields), progress=lambda done: bar(done, max(1, trace.size))
    )
    if trace.lengths is not None:
        raise InputError(
            f"{file}: holds histograms of lengths and no requests, and nothing of anyone; give it to --traffic as it is"
        )
    return trace


def say(done: str, path: Path, requests: int, notes: list[str], as_json: bool) -> None:
    """Print what was written; notes go to stderr."""
    close_bars()
    for note in notes:
        echo(note, err=True)
    if as_json:
        echo(json.dumps({"file": str(path), "requests": requests, "notes": notes}))
    else:
        echo(f"{done} {requests:,} requests to {path}")
