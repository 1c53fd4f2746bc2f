"""JSON lines with the lengths in their own keys: llmc's recordings, Mooncake's traces, and what people export."""

from __future__ import annotations

from collections.abc import Iterator

from llmc.buckets.traffic.formats.base import Fields, Head, RequestFormat
from llmc.buckets.traffic.rows import Columns, JsonRows, Rows, resolve
from llmc.errors import InputError


class JsonLines(RequestFormat):
    """An object for each request; `columns.py` has the spellings of keys."""

    name = "jsonl"
    title = "JSON lines"
    source = "llmc's own recordings; Mooncake's FAST'25 traces"

    def recognises(self, head: Head) -> bool:
        """Whether the first object has the two lengths."""
        try:
            return bool(head.objects) and isinstance(resolve(list(head.objects[0]), ""), Columns)
        except InputError:
            return False

    def rows(self, path: str, lines: Iterator[str], fields: Fields) -> Rows:
        """The rows."""
        return JsonRows(path, lines)
