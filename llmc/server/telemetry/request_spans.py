"""A span for each request, sent to an OTLP receiver by OpenTelemetry's SDK (the extra `otel`).

    llm_request                  from arrival to end, with the attributes below; in the trace of the request's
                                 `traceparent` header, if it has one
      queued, prefill, decode    its parts, as far as the request came

The names are vLLM's, which follow OpenTelemetry's conventions for generative AI (vllm-project/vllm, vllm/tracing, and
`do_tracing` of v1/engine/output_processor.py), so that the same dashboards and `llmc plan --traffic` read them. A span
holds lengths and times, never text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from llmc.errors import InputError
from llmc.platforms import missing
from llmc.runtime.engine.observer import Observer, RequestSummary
from llmc.version import __version__

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

FLAG = "--otlp-traces-endpoint"


class RequestSpans(Observer):
    """Sends spans to `endpoint`, the traces URL of a receiver for OTLP over HTTP.

    A thread of the SDK sends them in batches. Spans that a receiver rejects are lost, and the SDK logs that; nothing
    else is delayed. OpenTelemetry's variables (OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_…) set the rest.
    Raises InputError for an invalid URL, and DeviceError if the extra is not installed.
    """

    def __init__(self, endpoint: str) -> None:
        if not endpoint.startswith(("http://", "https://")):
            raise InputError(f"{FLAG} {endpoint!r} is not a URL; give it as http://localhost:4318/v1/traces")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError:
            raise missing("opentelemetry") from None
        resource = Resource({"service.name": "llmc"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("llmc", __version__)

    def finished(self, summary: RequestSummary) -> None:
        """Queue the request's spans."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        span = self._tracer.start_span(
            "llm_request", TraceContextTextMapPropagator().extract(summary.trace_headers), SpanKind.SERVER,
            attributes_of(summary), start_time=_nanoseconds(summary.arrived_at),
        )  # fmt: skip
        inside = set_span_in_context(span)
        for name, begin_s, end_s in _parts(summary):
            part = self._tracer.start_span(name, inside, start_time=_nanoseconds(summary.arrived_at + begin_s))
            part.end(_nanoseconds(summary.arrived_at + end_s))
        if "error" in summary.finish_reasons:
            span.set_status(StatusCode.ERROR)
        span.end(_nanoseconds(summary.arrived_at + summary.e2e_s))

    def close(self) -> None:
        """Send the remaining spans, and end the SDK's thread."""
        self._provider.shutdown()


def attributes_of(summary: RequestSummary) -> dict[str, AttributeValue]:
    """Return the attributes of a request's span, in seconds, tokens and sequences, for the parts it reached."""
    inference_s = None if summary.queue_s is None else summary.e2e_s - summary.queue_s
    found: dict[str, AttributeValue | None] = {
        "gen_ai.request.id": summary.request_id,
        "gen_ai.request.n": summary.n,
        "gen_ai.request.max_tokens": summary.max_tokens,
        "gen_ai.request.temperature": summary.temperature,
        "gen_ai.request.top_p": summary.top_p,
        "gen_ai.response.finish_reasons": summary.finish_reasons,
        "gen_ai.usage.prompt_tokens": summary.prompt_tokens,
        "gen_ai.usage.completion_tokens": summary.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": summary.cached_tokens,
        "gen_ai.latency.time_in_queue": summary.queue_s,
        "gen_ai.latency.time_to_first_token": summary.first_token_s,
        "gen_ai.latency.time_in_model_prefill": summary.prefill_s,
        "gen_ai.latency.time_in_model_decode": summary.decode_s,
        "gen_ai.latency.time_in_model_inference": inference_s,
        "gen_ai.latency.e2e": summary.e2e_s,
    }
    return {name: value for name, value in found.items() if value is not None}


def _parts(summary: RequestSummary) -> Iterator[tuple[str, float, float]]:
    """Yield name, start and end of each part that the request reached, in seconds since its arrival."""
    queue_s, first_s, end_s = summary.queue_s, summary.first_token_s, summary.e2e_s
    yield "queued", 0.0, end_s if queue_s is None else queue_s
    if queue_s is not None:
        yield "prefill", queue_s, end_s if first_s is None else first_s
        if first_s is not None:
            yield "decode", first_s, end_s


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
