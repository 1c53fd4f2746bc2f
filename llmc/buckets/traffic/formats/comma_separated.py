"""Comma-separated text with a header: the Azure traces, BurstGPT, and user exports."""

from __future__ import annotations

import csv
from collections.abc import Iterator

from llmc.buckets.traffic.formats.base import Fields, Head, RequestFormat
from llmc.buckets.traffic.rows import Columns, CsvRows, Rows, resolve
from llmc.errors import InputError


class CommaSeparated(RequestFormat):
    """A header line, then a line for each request; rows.py lists the column spellings."""

    name = "csv"
    title = "CSV with a header"
    source = "Azure Public Dataset (LLM inference traces 2023 and 2024), BurstGPT 1.1"

    def recognises(self, head: Head) -> bool:
        """Return whether the first non-blank line is a header with the two lengths."""
        first = next((line for line in head.text.split("\n") if line.strip()), "")
        try:
            return isinstance(resolve(next(csv.reader([first]), []), ""), Columns)
        except (InputError, csv.Error):
            return False

    def rows(self, path: str, lines: Iterator[str], fields: Fields) -> Rows:
        """Return the rows."""
        return CsvRows(path, lines)
