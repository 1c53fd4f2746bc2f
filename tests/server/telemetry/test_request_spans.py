"""Spans of requests, as a receiver of OTLP over HTTP gets them, and as Perfetto opens them."""

from __future__ import annotations

import base64
import json
import runpy
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from llmc.buckets.traffic.reader import Trace
from llmc.errors import DeviceError, InputError
from llmc.runtime.engine.observer import Observers
from llmc.server.telemetry.requests import RequestSpans
from tests.server.live import Live, completion, toy_bundle
from tests.server.telemetry import samples
from tests.server.telemetry.samples import Kept, summary

SCRIPT = Path(__file__).parents[3] / "docs" / "otlp_to_perfetto.py"


class Receiver(ThreadingHTTPServer):
    """Takes OTLP at /v1/traces, and answers each request with `status`."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []
        self.status = 200
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    @property
    def spans(self) -> list[dict[str, Any]]:
        """Those that came, in the JSON of OTLP."""
        return [
            span
            for batch in self.batches
            for resource in batch["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]

    def named(self, name: str) -> list[dict[str, Any]]:
        return [span for span in self.spans if span["name"] == name]


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.status == 200:
            self.server.batches.append(MessageToDict(ExportTraceServiceRequest.FromString(body)))
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class calls it so
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as built:
        thread = threading.Thread(target=built.serve_forever)
        thread.start()
        yield built
        built.shutdown()
        thread.join()


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    def plain(value: dict[str, Any]) -> Any:
        ((kind, found),) = value.items()
        if kind == "arrayValue":
            return [plain(one) for one in found["values"]]
        return int(found) if kind == "intValue" else found

    return {one["key"]: plain(one["value"]) for one in span["attributes"]}


def times(span: dict[str, Any]) -> tuple[float, float]:
    return int(span["startTimeUnixNano"]) / 1e9, int(span["endTimeUnixNano"]) / 1e9


def test_a_request_is_a_span_with_its_parts(receiver: Receiver) -> None:
    spans = RequestSpans(receiver.url)
    spans.finished(summary("a", temperature=0.5, top_p=1.0))
    spans.close()
    (span,) = receiver.named("llm_request")
    assert (span["kind"], times(span)) == ("SPAN_KIND_SERVER", (1000.0, 1003.0))
    assert attributes(span) == {
        "gen_ai.request.id": "a", "gen_ai.request.n": 1, "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 1.0, "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.prompt_tokens": 10, "gen_ai.usage.completion_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 4, "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_to_first_token": 1.0, "gen_ai.latency.time_in_model_prefill": 0.5,
        "gen_ai.latency.time_in_model_decode": 2.0, "gen_ai.latency.time_in_model_inference": 2.5,
        "gen_ai.latency.e2e": 3.0,
    }  # fmt: skip
    parts = [one for one in receiver.spans if one.get("parentSpanId") == span["spanId"]]
    assert [(one["name"], times(one)) for one in parts] == [
        ("queued", (1000.0, 1000.5)), ("prefill", (1000.5, 1001.0)), ("decode", (1001.0, 1003.0)),
    ]  # fmt: skip
    assert {one["traceId"] for one in receiver.spans} == {span["traceId"]}
    (resource,) = receiver.batches[0]["resourceSpans"]
    assert {"key": "service.name", "value": {"stringValue": "llmc"}} in resource["resource"]["attributes"]


def test_a_request_has_the_parts_that_it_came_to(receiver: Receiver) -> None:
    spans = RequestSpans(receiver.url)
    cut = {"first_token_s": None, "prefill_s": None, "decode_s": None, "finish_reasons": ("abort",)}
    spans.finished(summary("queued only", queue_s=None, **cut))
    spans.finished(summary("no token", **cut))
    spans.close()
    names = {}
    for span in receiver.named("llm_request"):
        found = attributes(span)
        assert not any("time_to_first_token" in name or "decode" in name for name in found)
        parts = [one for one in receiver.spans if one.get("parentSpanId") == span["spanId"]]
        names[found["gen_ai.request.id"]] = [one["name"] for one in parts]
        assert times(parts[-1])[1] == 1003.0
    assert names == {"queued only": ["queued"], "no token": ["queued", "prefill"]}


def test_a_request_that_failed_is_an_error(receiver: Receiver) -> None:
    spans = RequestSpans(receiver.url)
    spans.finished(summary("a", finish_reasons=("stop", "error")))
    spans.finished(summary("b"))
    spans.close()
    found = {attributes(one)["gen_ai.request.id"]: one.get("status") for one in receiver.named("llm_request")}
    assert found == {"a": {"code": "STATUS_CODE_ERROR"}, "b": {}}


def test_the_services_name_is_the_environments(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    spans = RequestSpans(receiver.url)
    spans.finished(summary())
    spans.close()
    (resource,) = receiver.batches[0]["resourceSpans"]
    assert {"key": "service.name", "value": {"stringValue": "chat"}} in resource["resource"]["attributes"]


def test_every_request_of_a_real_run_is_a_span(receiver: Receiver, tmp_path: Path) -> None:
    kept, spans = Kept(), RequestSpans(receiver.url)
    built = samples.engine(samples.toy_bundle(tmp_path), Observers([kept, spans]))
    samples.run(built, ["one", "another", "a third, longer one", "four", "and five"], cancelled=["4"])
    spans.close()
    found = {attributes(one)["gen_ai.request.id"]: one for one in receiver.named("llm_request")}
    assert set(found) == {one.request_id for one in kept.summaries} == {"0", "1", "2", "3", "4"}
    for one in kept.summaries:
        begin, end = times(found[one.request_id])
        assert (begin, end - begin) == pytest.approx((one.arrived_at, one.e2e_s), abs=1e-5)
        assert attributes(found[one.request_id])["gen_ai.usage.completion_tokens"] == one.output_tokens


def test_a_served_request_is_in_the_trace_of_its_header(receiver: Receiver, tmp_path: Path) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    spans = RequestSpans(receiver.url)
    with Live(toy_bundle(tmp_path), observers=(spans,)) as live:
        live.ready()
        header = f"00-{trace}-{parent}-01"
        assert live.ask("POST", "/v1/completions", completion(), traceparent=header).status == 200
    spans.close()
    (span,) = receiver.named("llm_request")
    assert base64.b64decode(span["traceId"]).hex() == trace
    assert base64.b64decode(span["parentSpanId"]).hex() == parent


def test_a_receiver_that_is_away_or_refuses_holds_nothing_up(receiver: Receiver) -> None:
    receiver.status = 400
    refused = RequestSpans(receiver.url)
    refused.finished(summary())
    refused.close()
    assert not receiver.batches


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", ""])
def test_what_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(InputError, match=r"--otlp-traces-endpoint .* is not a URL; give it as http://"):
        RequestSpans(endpoint)


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(DeviceError, match=r"opentelemetry is not installed; .*otel"):
        RequestSpans("http://localhost:4318/v1/traces")


@pytest.fixture
def written(receiver: Receiver, tmp_path: Path) -> Path:
    """Spans of three requests, a batch a line, as the Collector's file exporter writes them."""
    spans = RequestSpans(receiver.url)
    for number in range(3):
        spans.finished(summary(str(number), arrived_at=1000.0 + number))
    spans.close()
    path = tmp_path / "spans.jsonl"
    path.write_text("".join(json.dumps(batch) + "\n" for batch in receiver.batches))
    return path


def test_spans_are_a_traffic_log(written: Path) -> None:
    assert [(one.prompt, one.output, one.cached) for one in Trace(written)] == [(10, 5, 4)] * 3


def test_perfetto_gets_a_track_for_each_request(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script", str(written), str(tmp_path / "trace.json")])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks: dict[int, list[tuple[str, float, float]]] = {}
    for event in events:
        assert event["ph"] == "X"
        tracks.setdefault(event["tid"], []).append((event["name"], event["ts"], event["dur"]))
    assert len(tracks) == 3
    for number, track in enumerate(tracks.values()):
        at = 1e9 + number * 1e6
        assert sorted(track, key=lambda one: (one[1], -one[2])) == [
            ("llm_request", at, 3e6), ("queued", at, 5e5), ("prefill", at + 5e5, 5e5), ("decode", at + 1e6, 2e6),
        ]  # fmt: skip
