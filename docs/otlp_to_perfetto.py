"""Turn OpenTelemetry spans into a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

    python otlp_to_perfetto.py spans.jsonl trace.json

spans.jsonl is OTLP's JSON, a batch a line, as the Collector's `file` exporter writes it. Each request is a track of its
own, with its parts in it. Chrome's trace event format has times in microseconds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def spans(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Every span of the batches."""
    for line in filter(str.strip, lines):
        for resource in json.loads(line).get("resourceSpans", ()):
            for scope in resource.get("scopeSpans", ()):
                yield from scope.get("spans", ())


def events(lines: Iterable[str]) -> list[dict[str, Any]]:
    """A complete event for each span; a span and those below it share a track."""
    tracks: dict[str, int] = {}
    found = []
    for span in sorted(spans(lines), key=lambda span: int(span["startTimeUnixNano"])):
        begin, end = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
        named = {one["key"]: one["value"] for one in span.get("attributes", ())}
        values = {name: next(iter(value.values()), None) for name, value in named.items()}
        track = tracks.setdefault(span.get("parentSpanId") or span["spanId"], len(tracks) + 1)
        tracks[span["spanId"]] = track
        found.append({
            "ph": "X", "name": span["name"], "pid": 1, "tid": track, "ts": begin / 1e3, "dur": (end - begin) / 1e3,
            "args": values,
        })  # fmt: skip
    return found


if __name__ == "__main__":
    with Path(sys.argv[1]).open(encoding="utf-8") as source:
        Path(sys.argv[2]).write_text(json.dumps({"traceEvents": events(source)}))
