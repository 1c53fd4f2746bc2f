"""Traffic formats by name, each imported when a file is examined, and detection of a file's format."""

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
"""The format that cannot be detected: its lines are read by the names that --fields gives."""

HEADS = (1 << 16, 1 << 22)
"""Bytes of a file used to detect its format: few first, then more for a log that begins with a server's start-up."""

FALLBACKS = {".csv": "csv", ".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl"}
"""Format by suffix for a file that no format recognises; its error messages then apply."""


def create(name: str) -> Format:
    """Create a format by name. Raises UnknownNameError, listing the known names."""
    built: Format = FORMATS.get(name)()
    return built


def recognise(file: TraceFile) -> Format:
    """Return the format of a file. Raises InputError if no format matches."""
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
        f"{path}: matches no known traffic format: {', '.join(one.title for one in known if one.name != FIELDS)}; "
        f"name the format with --traffic-format ({', '.join(FORMATS.names())}), or the fields of its lines with "
        "--fields prompt=…,output=…"
    )
