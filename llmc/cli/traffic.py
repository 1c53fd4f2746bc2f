"""`llmc traffic`: show, merge, sample and anonymise recorded requests."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmc.buckets.render.text import counted
from llmc.cli.options import Command, add, argument, duration, flag, fraction, switch
from llmc.cli.output import ReadingProgress, StepProgress, close_bars, echo
from llmc.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from llmc.buckets.report.traffic_view import View
    from llmc.buckets.traffic.formats.base import Fields
    from llmc.buckets.traffic.length_histogram import Lengths
    from llmc.buckets.traffic.reader import Trace


_format = partial(flag, None, "NAME", "Format of the input. Default: detected from its first lines.")
_fields = partial(flag, None, "prompt=A,output=B[,time=C][,cached=D]", "Field names in its lines.")
_output = partial(flag, MISSING, "OUT", "Output file in JSON lines; .gz compresses it.", names="--output -o")


def fields_of(text: str | None) -> Fields:
    """The field names of --fields; empty without it."""
    from llmc.buckets.traffic.formats.fields import parse

    return {} if text is None else parse(text)


def open_trace(file: str, format_: str | None, fields: str | None, doing: str) -> Trace:
    """Open the requests in a file, with a progress bar labelled `doing`. Refuses histogram files and URLs."""
    from llmc.buckets.traffic.formats.prometheus.live import is_url
    from llmc.buckets.traffic.reader import Trace

    if is_url(file):
        raise InputError(
            f"{file}: is a URL, not a file of requests; sample it with llmc traffic show {file} --for 10m -o OUT.prom"
        )
    bar = ReadingProgress(f"{doing} {file}", "finish")
    trace: Trace = Trace(
        file, format=format_, fields=fields_of(fields), progress=lambda done: bar(done, max(1, trace.size))
    )
    if trace.lengths is not None:
        raise InputError(
            f"{file}: holds length histograms, not requests, and no personal data; pass it to --traffic as it is"
        )
    return trace


def say(done: str, path: Path, requests: int, notes: list[str], as_json: bool) -> None:
    """Print the result; notes go to stderr."""
    close_bars()
    for note in notes:
        echo(note, err=True)
    if as_json:
        echo(json.dumps({"file": str(path), "requests": requests, "notes": notes}))
    else:
        echo(f"{done} {counted(requests, 'request')} to {path}")


MIN, DEFAULT_FOR, DEFAULT_EVERY = 1.0, "60s", "5s"


@dataclass(frozen=True, kw_only=True)
class TrafficShowCommand(Command):
    """Show what recorded requests look like: their lengths, how many run at once, and how both change over time.

    Prometheus histograms only have lengths by interval, so percentiles are intervals too. Logs of steps (CUDA graph
    tables, batch sizes, missing buckets) show their shapes.

    \b
    Example:
      llmc traffic show requests.csv --plot traffic.html
      llmc traffic show server.log --json
      llmc traffic show access.log --fields prompt=usage.in,output=usage.out,time=time_iso8601
      llmc traffic show http://localhost:8000/metrics --for 10m -o sampled.prom
    """

    file: str = argument("FILE|URL", "A log, trace or scrape, or a server's http://…/metrics.")
    plot: Path | None = flag(None, "OUT", "Draw the result: a .png, or a self-contained .html.")
    slots: int = flag(256, "N", "Concurrent requests of the simulated server.", names="--max-num-seqs", min=1)
    seconds: str | None = flag(None, "T", f"How long to sample the URL. Default: {DEFAULT_FOR}.", names="--for")
    every: str | None = flag(None, "T", f"Time between scrapes. Default: {DEFAULT_EVERY}.")
    output: Path | None = flag(None, "OUT", "Write the sample here, for --traffic.", names="--output -o")
    traffic_format: str | None = _format()
    fields: str | None = _fields()
    as_json: bool = switch("--json", "Print JSON.")

    def run(self) -> None:
        from llmc.buckets.render.page import check
        from llmc.buckets.report.traffic_view import view
        from llmc.buckets.traffic.formats.prometheus.live import is_url

        if self.plot is not None:
            check(self.plot)
        if is_url(self.file):
            if self.traffic_format or self.fields:
                raise InputError("a URL is read as Prometheus metrics; leave out --traffic-format and --fields")
            found: View = view(_sampled(self.file, self.seconds, self.every, self.output))
        else:
            for name, given in (("--for", self.seconds), ("--every", self.every), ("--output", self.output)):
                if given is not None:
                    raise InputError(f"{name} is for sampling a URL, but {self.file} is a file; leave it out")
            bar = ReadingProgress(f"read {self.file}", "finish")
            found = view(
                self.file, format=self.traffic_format, fields=fields_of(self.fields), slots=self.slots, progress=bar
            )
        close_bars()
        if self.plot is not None:
            from llmc.buckets.report.traffic_page import draw

            draw(self.plot, self.file, found)
            echo(f"wrote {self.plot}", err=True)
        for note in found.notes:
            echo(note, err=True)
        echo(json.dumps(_json(self.file, found)) if self.as_json else found.text, nl=self.as_json)


def _sampled(url: str, seconds: str | None, every: str | None, output: Path | None) -> Lengths:
    from llmc.buckets.traffic.formats.prometheus.live import sample
    from llmc.buckets.traffic.formats.prometheus.scrape import text
    from llmc.files import write_text

    time = max(MIN, duration("--for", seconds or DEFAULT_FOR) or 0.0)
    step = max(MIN, duration("--every", every or DEFAULT_EVERY) or 0.0)
    with StepProgress("sample") as progress:
        found = sample(
            url,
            time,
            step,
            lambda gone, total, number: progress(f"{number:,} requests in {gone:.0f} s", round(gone), round(total)),
        )
    if output is not None:
        write_text(output, text(found), "sample")
        echo(f"wrote {output}", err=True)
    return found


def _json(file: str, found: View) -> dict[str, Any]:
    return {"file": file, "format": found.format, **found.document, "notes": list(found.notes)}


@dataclass(frozen=True, kw_only=True)
class TrafficMergeCommand(Command):
    """Merge recordings of several servers, or of several days, into one recording in time order.

    Only times and lengths are kept. --traffic-format and --fields apply to all files.

    \b
    Example:
      llmc traffic merge replica-0.log replica-1.log -o all.jsonl
      llmc traffic merge monday.csv tuesday.csv --align after -o week.jsonl.gz
    """

    files: list[str] = argument("FILE...", "Logs or traces, each in any format.")
    output: Path = _output()
    align: str = flag(
        "recorded", "recorded|start|after", "Keep recorded times, start all files at once, or one after the other."
    )
    traffic_format: str | None = _format()
    fields: str | None = _fields()
    as_json: bool = switch("--json", "Print JSON.")

    def run(self) -> None:
        from llmc.buckets.traffic.recording import ALIGNMENTS, merged, write

        chosen = next((known for known in ALIGNMENTS if known == self.align), None)
        if chosen is None:
            raise UnknownNameError("alignment", self.align, ALIGNMENTS)
        traces = [open_trace(file, self.traffic_format, self.fields, "merge") for file in self.files]
        found = merged(traces, chosen)
        number = write(self.output, found.requests, start=found.start)
        say(
            "merged",
            self.output,
            number,
            [f"{trace.path}: {note}" for trace in traces for note in trace.counted()],
            self.as_json,
        )


@dataclass(frozen=True, kw_only=True)
class TrafficSampleCommand(Command):
    """Draw a random sample of the requests. Times are kept, so fewer requests arrive per second.

    To plan for the original load, use the --arrival-rate that the command prints.

    \b
    Example:
      llmc traffic sample requests.csv -n 10000 -o part.jsonl
      llmc traffic sample server.log --share 1% --seed 7 -o part.jsonl.gz
    """

    file: str = argument("FILE", "A log or trace of any format.")
    output: Path = _output()
    number: int | None = flag(None, "N", "Number of requests; reads the file twice.", names="-n --number", min=1)
    share: str | None = flag(None, "P", "Take each request with this probability, e.g. 10%.")
    seed: int = flag(0, "N", "Random seed; the same seed draws the same requests.")
    traffic_format: str | None = _format()
    fields: str | None = _fields()
    as_json: bool = switch("--json", "Print JSON.")

    def run(self) -> None:
        from llmc.buckets.traffic.recording import chosen, sampled, write

        part = fraction("--share", self.share)
        if (self.number is None) == (part is None):
            raise InputError("say how much to draw: -n N requests, or --share P of them")
        trace = open_trace(self.file, self.traffic_format, self.fields, "sample")
        summary = trace.summary() if self.number is not None else None
        if self.number is not None and summary is not None:
            requests = chosen(trace, self.number, summary.requests, self.seed)
        else:
            requests = sampled(trace, part or 0.0, self.seed)
        done = write(self.output, requests)
        notes = trace.counted()
        if summary is not None and summary.rate:
            rate = f"{summary.rate:.3g}"
            notes.append(f"{rate} requests per second arrived in the original: plan with --arrival-rate {rate}")
        say("sampled", self.output, done, notes, self.as_json)


@dataclass(frozen=True, kw_only=True)
class TrafficAnonymiseCommand(Command):
    """Remove everything private from a recording: keep only request lengths and the seconds since the first request.

    Prompts, answers, ids, users, addresses, models and dates are not copied. Lengths alone can still identify a request
    to somebody who has the same prompts. --round-to and --jitter make that harder at little cost to a plan.

    \b
    Example:
      llmc traffic anonymise server.log -o traffic.jsonl
      llmc traffic anonymise server.log --round-to 16 --jitter 5s -o traffic.jsonl.gz
    """

    file: str = argument("FILE", "A log or trace of any format.")
    output: Path = _output()
    round_to: int = flag(1, "N", "Round lengths up to multiples of N tokens.", min=1)
    jitter: str | None = flag(None, "T", "Shift each time randomly by up to T, e.g. 2s.")
    seed: int | None = flag(None, "N", "Repeat the same shifts; whoever knows N can undo them. Default: none.")
    traffic_format: str | None = _format()
    fields: str | None = _fields()
    as_json: bool = switch("--json", "Print JSON.")

    def run(self) -> None:
        from llmc.buckets.traffic.recording import anonymised, write

        trace = open_trace(self.file, self.traffic_format, self.fields, "anonymise")
        moved = duration("--jitter", self.jitter) or 0.0
        number = write(self.output, anonymised(trace, round_to=self.round_to, jitter=moved, seed=self.seed))
        say("anonymised", self.output, number, trace.counted(), self.as_json)


app = typer.Typer(
    help="Show, merge, sample or anonymise recorded traffic of any format.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for name, command in {
    "show": TrafficShowCommand,
    "merge": TrafficMergeCommand,
    "sample": TrafficSampleCommand,
    "anonymise": TrafficAnonymiseCommand,
}.items():
    add(app, name, command)
