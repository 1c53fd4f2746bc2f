"""Responses of Prometheus' HTTP API: a range query (a matrix), or an instant one (a vector)."""

from __future__ import annotations

import json
import re
from typing import Any

from llmc.buckets.traffic.formats.base import Head, LengthFormat
from llmc.buckets.traffic.formats.prometheus.exposition import Sample, number
from llmc.buckets.traffic.formats.prometheus.increase import MAX_SERIES, Increase
from llmc.buckets.traffic.formats.prometheus.names import QUERY, series
from llmc.buckets.traffic.length_histogram import Lengths
from llmc.buckets.traffic.trace_file import Progress, TraceFile
from llmc.errors import InputError

MAX_BYTES = 24 << 20
"""Most bytes of a response; forty series at 11,000 points, Prometheus' maximum, are 10 MB."""

_START = re.compile(r'\s*\{\s*"status"\s*:\s*"(?:success|error)"')


class Api(LengthFormat):
    """The JSON response of /api/v1/query_range to a query of the raw series; only their increase counts."""

    name = "prometheus-api"
    title = "a query's JSON from Prometheus"
    source = "Prometheus HTTP API v1 (docs/querying/api.md)"

    def recognises(self, head: Head) -> bool:
        """Return whether the text starts like a response."""
        return _START.match(head.text) is not None

    def lengths(self, file: TraceFile, progress: Progress | None = None) -> Lengths:
        """Return the histograms of the file."""
        where = str(file.path)
        try:
            answer = json.loads(file.text(MAX_BYTES, progress))
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{where}: not valid JSON: {error}; save the answer of /api/v1/query_range whole"
            ) from None
        points: dict[float, list[Sample]] = {}
        for one in _result(answer, where):
            labels = {str(name): str(value) for name, value in _object(one.get("metric")).items()}
            known = series(labels.get("__name__", ""), labels)
            if "histograms" in one or "histogram" in one:
                raise InputError(
                    f"{where}: has native histograms, which are not read; query the classic series: {QUERY}"
                )
            if known is None:
                continue
            for moment, value in _values(one, where):
                points.setdefault(moment, []).append(Sample(known, labels, value, moment))
        if not points:
            raise InputError(
                f"{where}: has no series of token histograms; query the raw series, without rate(): {QUERY}"
            )
        found = Increase(where)
        for moment in sorted(points):
            found.add(points[moment])
        return found.lengths()


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _result(answer: object, where: str) -> list[dict[str, Any]]:
    document = _object(answer)
    if document.get("status") == "error":
        raise InputError(
            f"{where}: Prometheus refused the query: {str(document.get('error'))[:200]}; query again: {QUERY}"
        )
    result = _object(document.get("data")).get("result")
    if not isinstance(result, list) or len(result) > MAX_SERIES or not all(isinstance(one, dict) for one in result):
        raise InputError(f"{where}: is not the answer to a Prometheus query; save that of /api/v1/query_range")
    return result


def _values(one: dict[str, Any], where: str) -> list[tuple[float, float]]:
    found = []
    for pair in one.get("values") or [one.get("value")]:
        moment = number(str(pair[0])) if isinstance(pair, list) and len(pair) == 2 else None
        if moment is None:
            raise InputError(f"{where}: a series whose values are not pairs of time and value; query again: {QUERY}")
        value = number(str(pair[1]))
        if value is not None:
            found.append((moment, value))
    return found
