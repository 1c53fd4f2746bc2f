"""Traffic formats by name, each imported when a file is looked at, and the recognition of a file by what it says."""

from __future__ import annotations

from llmc.buckets.traffic.formats.base import Format, Head
from llmc.buckets.traffic.trace_file import TraceFile
from llmc.errors import InputError
from llmc.registry import Registry

_HERE = "llmc.buckets.traffic.formats"

_OWN = {
    "prometheus": f"{_HERE}.prometheus.scrape:Scrape",
    "prometheus-api": f"{_HERE}.prometheus.api:Api",
    "otlp": f"{_HERE}.otlp:OtlpSpans",
    "jsonl": f"{_HERE}.json_lines:JsonLines",
    "openai": f"{_HERE}.openai_usage:OpenAIUsage",
    "csv": f"{_HERE}.comma_separated:CommaSeparated",
    "fields": f"{_HERE}.fields:FieldLog",
}

FORMATS = Registry("traffic format", own=_OWN, parts="llmc.integrations:logs")
"""Classes that take no arguments, see base.py. Logs and metrics of single systems are read by their integrations."""

FIELDS = "fields"
"""The format that has no look of its own: its lines are read by the names that --fields gives."""

HEADS = (1 << 16, 1 << 22)
"""Bytes of a file that formats are recognised by: few first, and more where a server's start-up comes before."""

FALLBACKS = {".csv": "csv", ".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl"}
"""By suffix, whose messages a file gets that looks like nothing."""


def create(name: str) -> Format:
    """A format by name. Raises UnknownNameError, listing the known names."""
    built: Format = FORMATS.get(name)()
    return built


def recognise(file: TraceFile) -> Format:
    """The format that a file is written in. Raises InputError for one that looks like none."""
    others = (name for name in FORMATS.names() if name not in _OWN)
    known = sorted(map(create, [*_OWN, *others]), key=lambda one: one.tried)
    path = str(file.path)
    for size in HEADS:
        text, whole = file.start(size)
        head = Head(path, text, whole)
        for format_ in known:
            if format_.recognises(head):
                return format_
        if whole:
            break
    if not text.strip():
        raise InputError(f"{path}: the file is empty; give one with at least one request")
    if head.suffix in FALLBACKS:
        return create(FALLBACKS[head.suffix])
    raise InputError(
        f"{path}: looks like no traffic that is known: {', '.join(one.title for one in known if one.name != FIELDS)}; "
        f"say which it is with --traffic-format ({', '.join(FORMATS.names())}), or name the fields of its lines with "
        "--fields prompt=…,output=…"
    )
