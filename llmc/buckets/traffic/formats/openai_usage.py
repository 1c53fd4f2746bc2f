"""Logs of responses with `usage` in the form of OpenAI's API: of gateways, proxies, batches and access logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmc.buckets.render.text import counted
from llmc.buckets.traffic.formats.base import Fields, Found, FoundRows, Head, Location, RequestFormat
from llmc.buckets.traffic.formats.objects import objects, time, tokens
from llmc.buckets.traffic.rows import SPELLINGS, Rows
from llmc.buckets.traffic.timestamps import Moment
from llmc.errors import InputError

DEEPEST = 4
"""Nesting depth of the search for `usage`: a log's line, its response, the response's body."""

TIMES = (*SPELLINGS["time"], "@timestamp", "ts", "date", "startTime", "created", "created_at")
"""Keys of the time, the likeliest arrival time first; `created` is the API's own."""


class OpenAIUsage(RequestFormat):
    """JSON objects, one per line, that hold `usage` with prompt_ and completion_tokens, or input_ and output_tokens.

    The cached tokens are those of prompt_tokens_details or input_tokens_details. Anthropic's usage is also read; its
    input tokens exclude those read from the cache and written to it. Objects without usage (chunks of a stream, errors)
    are skipped.
    """

    name = "openai"
    title = "answers with OpenAI's usage"
    source = "OpenAI's usage of chat completions, completions, responses and batches; Anthropic's of Messages"

    def recognises(self, head: Head) -> bool:
        """Return whether one of the first objects has `usage`."""
        return any(_usage(one) is not None for one in head.objects)

    def rows(self, path: str, lines: Iterator[str], fields: Fields) -> Rows:
        """Return the rows. Also raises InputError where no object has usage."""
        location = Location(path)
        return FoundRows(location, _found(location, lines))


def _found(location: Location, lines: Iterator[str]) -> Iterator[Found]:
    read = reported = 0
    location.notes = lambda: [f"left out: {counted(read - reported, 'line')} without usage"] if reported < read else []
    for record in objects(location, lines):
        read += 1
        found = _usage(record)
        if found is None:
            continue
        reported += 1
        usage, around = found
        yield (_time(around, location), *_lengths(usage, location))
    if not reported:
        raise InputError(
            f"{location.path}: none of {read} objects has usage with prompt_tokens and completion_tokens; log the "
            'usage of answers, for streams with stream_options {"include_usage": true}'
        )


def _usage(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]] | None:
    """The usage in `record`, nearest to the top, and the objects around it, the record first."""
    level: list[list[Mapping[str, Any]]] = [[record]]
    for _ in range(DEEPEST):
        for path in level:
            usage = path[-1].get("usage")
            if isinstance(usage, dict) and ("prompt_tokens" in usage or "input_tokens" in usage):
                return usage, path
        level = [[*path, value] for path in level for value in path[-1].values() if isinstance(value, dict)]
    return None


def _time(around: list[Mapping[str, Any]], location: Location) -> Moment | None:
    for one in around:
        for name in TIMES:
            if name in one:
                return time(one[name], location, name)
    return None


def _lengths(usage: Mapping[str, Any], location: Location) -> tuple[int, int, int]:
    def of(record: Mapping[str, Any], name: str) -> int:
        return tokens(record.get(name), location, name)

    if "prompt_tokens" in usage:
        details = usage.get("prompt_tokens_details")
        cached = of(details, "cached_tokens") if isinstance(details, dict) else 0
        return of(usage, "prompt_tokens"), of(usage, "completion_tokens"), cached
    details = usage.get("input_tokens_details")
    if isinstance(details, dict):
        return of(usage, "input_tokens"), of(usage, "output_tokens"), of(details, "cached_tokens")
    read, created = of(usage, "cache_read_input_tokens"), of(usage, "cache_creation_input_tokens")
    return of(usage, "input_tokens") + read + created, of(usage, "output_tokens"), read
