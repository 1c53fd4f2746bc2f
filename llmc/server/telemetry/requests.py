"""Records of finished requests: a line of lengths and times for the next plan, or an OpenTelemetry span."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.recording import record_line
from llmc.errors import InputError
from llmc.platforms import missing
from llmc.runtime.engine.observer import Observer, RequestSummary
from llmc.version import __version__

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue


Item = TypeVar("Item")

PERIOD_S = 0.25
"""Seconds until an item is written, at most, while the disk keeps up."""

MAX_PENDING = 1 << 16
"""Maximum number of waiting items; further ones are lost and counted."""

BATCH = 256
"""Maximum number of items per write."""

_log = logging.getLogger("llmc")
_START = b'{"time": '
_LONGEST_LINE = 256


class BackgroundFile(Generic[Item]):
    """A file that a separate thread appends lines to: a slow or full disk never delays the engine.

    Writes `render(item)` for each item, in order; items are whole lines, and a write never contains half of one.

    A failed write (disk full) is logged once and its items are lost; later items are tried again, and success is
    logged. Only the constructor raises: OSError if the file cannot be opened.
    """

    def __init__(self, path: Path, render: Callable[[Item], str]) -> None:
        self.path = path
        self.lost = 0
        self._render = render
        self._pending: deque[Item] = deque()
        self._wake = threading.Condition()
        self._flushes = self._flushed = 0
        self._end = False
        self._closed = False
        self._failing = False
        self._file = os.open(path, os.O_APPEND | os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._thread = threading.Thread(target=self._run, name="llmc-recorder", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Queue `item` for writing; from one thread only. Takes 0.1 µs."""
        if self._closed or len(self._pending) >= MAX_PENDING:
            self.lost += 1
        else:
            self._pending.append(item)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until earlier items are written or lost; false on a timeout."""
        with self._wake:
            self._flushes += 1
            mine = self._flushes
            self._wake.notify_all()
            return self._wake.wait_for(lambda: self._flushed >= mine or not self._thread.is_alive(), timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Write the rest and close; waits at most `timeout_s`. Idempotent."""
        with self._wake:
            self._end = True
            self._wake.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        end = False
        while not end:
            with self._wake:
                self._wake.wait_for(lambda: self._end or self._flushes > self._flushed, PERIOD_S)
                end, flushes = self._end, self._flushes
            while self._pending:
                self._write_batch()
            with self._wake:
                self._flushed = flushes
                self._wake.notify_all()
        self._closed = True
        os.close(self._file)

    def _write_batch(self) -> None:
        items = [self._pending.popleft() for _ in range(min(BATCH, len(self._pending)))]
        data = memoryview("".join(map(self._render, items)).encode())
        done = 0
        try:
            while done < len(data):
                done += os.write(self._file, data[done:])
        except OSError as error:
            self.lost += len(items)
            self._take_back(done)
            if not self._failing:
                self._failing = True
                _log.warning("cannot write %s: %s; entries are lost until there is room", self.path, error.strerror)
            return
        if self._failing:
            self._failing = False
            _log.warning("%s is written again; %d entries were lost", self.path, self.lost)

    def _take_back(self, count: int) -> None:
        if count:
            try:
                os.ftruncate(self._file, os.fstat(self._file).st_size - count)
            except OSError as error:
                _log.warning("%s ends with an incomplete line: %s", self.path, error.strerror)


class TrafficRecorder(Observer):
    """Appends every finished request to `path`, in the format that `llmc plan --traffic` reads.

    A request that was cut short (client gone, error, shutdown) is recorded with what it got; readers count and skip
    those with 0 output tokens. A request of several choices gives one line per choice: they share its output tokens
    evenly, and the prompt counts as cached for all but the first.

    Lines are written whole within 0.25 s of a request's end, so several servers may append to one file. Times are
    arrivals in seconds since the epoch. An incomplete last line, from a crash, is removed. A failing disk is logged
    once, and tried again. Raises InputError if `path` cannot be written or is not a recording.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = Path(path)
        try:
            _mend(path)
            self._file = BackgroundFile[RequestSummary](path, lines_of)
        except OSError as error:
            raise InputError(
                f"cannot write the traffic recording {path}: {error.strerror}; give another file with --record-traffic"
            ) from None

    def finished(self, summary: RequestSummary) -> None:
        """Record the request."""
        self._file.put(summary)

    @property
    def lost(self) -> int:
        """Requests that could not be written."""
        return self._file.lost

    def flush(self) -> bool:
        """Wait until earlier requests are in the file or lost."""
        return self._file.flush()

    def close(self) -> None:
        """Write the rest and close."""
        self._file.close()


def lines_of(summary: RequestSummary) -> str:
    """Return the lines of one request, one per choice."""
    choices = max(1, len(summary.finish_reasons))
    each, more = divmod(summary.output_tokens, choices)
    time = round(summary.arrived_at, 3)
    return "".join(
        record_line(
            TrafficRequest(
                time, summary.prompt_tokens, each + (i < more), summary.prompt_tokens if i else summary.cached_tokens
            )
        )
        for i in range(choices)
    )


def _mend(path: Path) -> None:
    """Remove an incomplete last line. Raises InputError for a file that is not a recording."""
    if not path.is_file() or not (size := path.stat().st_size):
        return
    with path.open("r+b") as file:
        first = file.read(len(_START))
        if not first or not _START.startswith(first):
            raise InputError(
                f"{path} is not a recording: its first line has another format; give another file with --record-traffic"
            )
        file.seek(max(0, size - _LONGEST_LINE))
        tail = file.read()
        if tail.endswith(b"\n"):
            return
        half = tail[tail.rfind(b"\n") + 1 :]
        if not (half.startswith(_START) or _START.startswith(half)):
            raise InputError(
                f"{path} is not a recording: its last line has another format; give another file with --record-traffic"
            )
        if half.endswith(b"}"):
            file.write(b"\n")
        else:
            file.truncate(size - len(half))


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
    """Name, start and end of each part that the request reached, in seconds since its arrival."""
    queue_s, first_s, end_s = summary.queue_s, summary.first_token_s, summary.e2e_s
    yield "queued", 0.0, end_s if queue_s is None else queue_s
    if queue_s is not None:
        yield "prefill", queue_s, end_s if first_s is None else first_s
        if first_s is not None:
            yield "decode", first_s, end_s


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
