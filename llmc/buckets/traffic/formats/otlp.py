"""OpenTelemetry spans of LLM calls, in OTLP's JSON: one batch per line, as written by the Collector's file exporter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from llmc.buckets.traffic.formats.base import Fields, Found, FoundRows, Head, Location, RequestFormat
from llmc.buckets.traffic.formats.objects import objects, tokens
from llmc.buckets.traffic.rows import Rows, shown
from llmc.buckets.traffic.timestamps import Moment
from llmc.errors import InputError

PROMPT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
CACHED = ("gen_ai.usage.cache_read.input_tokens",)
"""Attributes of the usage, the current name first; vLLM's tracing wrote the older ones."""

START = "startTimeUnixNano"
NANOSECOND_DIGITS = 20
"""Digits of an unsigned 64-bit number."""

OPERATION = "gen_ai.operation.name"
AGENT_OPERATIONS = frozenset({"create_agent", "invoke_agent", "invoke_workflow", "execute_tool"})
"""Spans of these operations repeat the usage of the calls below them."""

REMEMBERED = 1 << 14
"""Spans whose relations are kept, to count a call once when both client and server report it."""


class OtlpSpans(RequestFormat):
    """Spans with `gen_ai.usage.*`: each is a request that arrived when the span started.

    Of two such spans, parent and child, the first in the file counts: a client's span ends after its server's. Spans of
    agents do not count, since they sum the usage of their calls.
    """

    name = "otlp"
    title = "OpenTelemetry spans (OTLP JSON)"
    source = "OpenTelemetry's conventions for generative AI at a064dcc (after 1.37), docs/gen-ai/gen-ai-spans.md"

    def recognises(self, head: Head) -> bool:
        """Return whether the first object is a batch of spans."""
        return head.text.lstrip()[:32].replace(" ", "").startswith('{"resourceSpans"')

    def rows(self, path: str, lines: Iterator[str], fields: Fields) -> Rows:
        """Return the rows. Also raises InputError where no span reports its usage."""
        location = Location(path)
        return FoundRows(location, _found(location, lines))


def _found(location: Location, lines: Iterator[str]) -> Iterator[Found]:
    family: OrderedDict[tuple[str, str], None] = OrderedDict()
    spans = reported = repeated = 0
    location.notes = lambda: (
        [f"{repeated} spans that repeat the usage of their calls were left out"] if repeated else []
    )
    for batch in objects(location, lines):
        for span in _spans(batch):
            spans += 1
            known = _attributes(span)
            names = [next((name for name in among if name in known), None) for among in (PROMPT, OUTPUT, CACHED)]
            if names[0] is None:
                continue
            reported += 1
            own, parent = (str(span.get("traceId")), str(span.get("spanId"))), span.get("parentSpanId")
            above = (own[0], str(parent)) if parent else None
            if known.get(OPERATION) in AGENT_OPERATIONS or own in family or above in family:
                repeated += 1
                continue
            family[own] = None
            if above is not None:
                family[above] = None
            while len(family) > REMEMBERED:
                family.popitem(last=False)
            prompt, output, cached = (tokens(known[name], location, name) if name else 0 for name in names)
            yield _start(span, location), prompt, output, cached
    if not reported:
        raise InputError(
            f"{location.path}: none of {spans} spans has {PROMPT[0]}; export the spans of the model's calls, and let "
            "their instrumentation record usage (vLLM: --otlp-traces-endpoint)"
        )


def _start(span: Mapping[str, Any], location: Location) -> Moment | None:
    value = span.get(START)
    if value is None:
        return None
    if not (str(value).isdecimal() and len(str(value)) <= NANOSECOND_DIGITS):
        raise InputError(f"{location}, field {START!r}: found {shown(value)}, which is not a number of nanoseconds")
    return Moment(int(value) / 1e9, "utc")


def _spans(batch: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for resource in _list(batch.get("resourceSpans")):
        for scope in _list(resource.get("scopeSpans")):
            yield from _list(scope.get("spans"))


def _list(value: object) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _attributes(span: Mapping[str, Any]) -> dict[str, object]:
    found: dict[str, object] = {}
    for one in _list(span.get("attributes")):
        key, value = one.get("key"), one.get("value")
        if isinstance(key, str) and key.startswith("gen_ai.") and isinstance(value, dict):
            found[key] = next(iter(value.values()), None)
    return found
