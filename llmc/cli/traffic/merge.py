"""`llmc traffic merge`: several logs as one recording."""

from __future__ import annotations

from typing import Annotated

import typer

from llmc.cli.options import option
from llmc.cli.traffic.common import FieldsFlag, FormatFlag, JsonFlag, OutputFlag, open_trace, say
from llmc.errors import UnknownNameError


def merge_command(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Logs or traces, each of any format.")],
    output: OutputFlag,
    align: Annotated[
        str,
        option(
            "--align",
            "recorded|start|after",
            "Each at its own time; all from one moment on; or one after the other.",
        ),
    ] = "recorded",
    traffic_format: FormatFlag = None,
    fields: FieldsFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Merge the requests of several servers, or of several days, in order of time, into one recording.

    Only times and lengths are kept. --traffic-format and --fields hold for all files.

    \b
    Example:
      llmc traffic merge replica-0.log replica-1.log -o all.jsonl
      llmc traffic merge monday.csv tuesday.csv --align after -o week.jsonl.gz
    """
    from llmc.buckets.traffic.recording import ALIGNMENTS, merged, write

    chosen = next((known for known in ALIGNMENTS if known == align), None)
    if chosen is None:
        raise UnknownNameError("alignment", align, ALIGNMENTS)
    traces = [open_trace(file, traffic_format, fields, "merge") for file in files]
    found = merged(traces, chosen)
    number = write(output, found.requests, start=found.start)
    say("merged", output, number, [f"{trace.path}: {note}" for trace in traces for note in trace.counted()], as_json)


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("merge")(merge_command)
