"""JSON lines with the lengths as top-level keys: llmc's recordings, Mooncake's traces, and user exports."""

from __future__ import annotations

from collections.abc import Iterator

from llmc.buckets.traffic.formats.base import Fields, Head, RequestFormat
from llmc.buckets.traffic.rows import Columns, JsonRows, Rows, resolve
from llmc.errors import InputError


class JsonLines(RequestFormat):
    """An object for each request; rows.py lists the key spellings."""

    name = "jsonl"
    title = "JSON lines"
    source = "llmc's own recordings; Mooncake's FAST'25 traces"

    def recognises(self, head: Head) -> bool:
        """Return whether the first object has the two lengths."""
        try:
            return bool(head.objects) and isinstance(resolve(list(head.objects[0]), ""), Columns)
        except InputError:
            return False

    def rows(self, path: str, lines: Iterator[str], fields: Fields) -> Rows:
        """Return the rows."""
        return JsonRows(path, lines)
