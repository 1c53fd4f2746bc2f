"""Requests from logs that other servers and gateways write."""

from __future__ import annotations

import json

import pytest

from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.formats.fields import parse
from llmc.buckets.traffic.reader import Trace
from llmc.errors import InputError
from tests.buckets.traffic.files import written
from tests.buckets.traffic.formats import logs
from tests.buckets.traffic.formats.logs import batch, span

NGINX = {"time": "2026-11-23T12:58:{:02d}+01:00", "in": "{}", "out": "{}", "status": "200", "request": "POST /v1"}


def of(folder, text: str, **more) -> list[TrafficRequest]:
    return list(Trace(written(folder, "log", text), **more))


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


class TestOpenTelemetry:
    def test_spans_of_any_names_that_usage_had(self, tmp_path):
        text = "\n".join(
            [
                batch(
                    span("t1", "a", 101.5, {"gen_ai.usage.input_tokens": 7, "gen_ai.usage.output_tokens": 3}),
                    span("t2", "b", 100, {"gen_ai.usage.prompt_tokens": 5, "gen_ai.usage.completion_tokens": 2}),
                    span("t2", "x", 100, {"http.status": 200}),
                ),
                batch(
                    span(
                        "t3",
                        "c",
                        102,
                        {
                            "gen_ai.usage.input_tokens": 9,
                            "gen_ai.usage.output_tokens": 1,
                            "gen_ai.usage.cache_read.input_tokens": 4,
                        },
                        kind="doubleValue",
                    )
                ),
            ]
        )
        assert of(tmp_path, text) == [TrafficRequest(0, 5, 2), TrafficRequest(1.5, 7, 3), TrafficRequest(2, 9, 1, 4)]

    def test_a_call_that_client_server_and_agent_tell_of_counts_once(self, tmp_path):
        usage = {"gen_ai.usage.input_tokens": 7, "gen_ai.usage.output_tokens": 3}
        spans = [
            span("t", "server", 2, usage, parent="client"),
            span("t", "client", 1, usage, parent="agent"),
            span("t", "second", 3, usage, parent="agent"),
            span("t", "agent", 0, {**usage, "gen_ai.operation.name": "invoke_agent"}),
        ]
        trace = Trace(written(tmp_path, "log", batch(*spans)))
        assert len(list(trace)) == 2
        assert trace.notes() == ["2 spans that repeat the usage of their calls were left out"]

    def test_spans_without_usage_are_a_log_without_lengths(self, tmp_path):
        with pytest.raises(InputError, match=r"none of 1 spans has gen_ai\.usage\.input_tokens"):
            of(tmp_path, batch(span("t", "a", 1, {"http.status": 200})))


class TestUsage:
    def test_answers_at_any_depth_and_of_any_api(self, tmp_path):
        chat = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
        responses = {"input_tokens": 8, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 0}}
        anthropic = {
            "input_tokens": 1,
            "output_tokens": 5,
            "cache_read_input_tokens": 6,
            "cache_creation_input_tokens": 2,
        }
        text = lines(
            {"created": 1700000000, "usage": chat},
            {"id": "batch_1", "response": {"status_code": 200, "body": {"created": 1700000001, "usage": responses}}},
            {"timestamp": "2023-11-14T22:13:22.5Z", "message": {"usage": anthropic}},
            {"created": 1700000003, "usage": None},
        )
        trace = Trace(written(tmp_path, "log", text))
        assert list(trace) == [TrafficRequest(0, 9, 2, 4), TrafficRequest(1, 8, 3), TrafficRequest(2.5, 9, 5, 6)]
        assert trace.notes() == ["left out: 1 line without usage"]
        assert trace.start is not None and trace.start == (1700000000.0, "utc")

    def test_no_usage_is_a_log_without_lengths(self, tmp_path):
        with pytest.raises(InputError, match=r"none of 1 objects has usage.*include_usage"):
            of(tmp_path, lines({"usage": None}), format="openai")

    def test_mixed_time_zones_are_refused(self, tmp_path):
        usage = {"prompt_tokens": 9, "completion_tokens": 2}
        text = lines({"time": "2026-11-23T12:00:00Z", "usage": usage}, {"time": "2026-11-23T12:00:01", "usage": usage})
        with pytest.raises(InputError, match="line 2: the time has no time zone, unlike the lines before"):
            of(tmp_path, text)


class TestFields:
    FIELDS = parse("prompt=in,output=out,time=time")

    def test_an_access_log_of_a_proxy(self, tmp_path):
        text = lines(
            {**NGINX, "time": "2026-11-23T12:58:01+01:00", "in": "374", "out": "44"},
            {**NGINX, "time": "2026-11-23T11:58:03+00:00", "in": "20", "out": "5"},
            {**NGINX, "time": "2026-11-23T12:58:04+01:00", "in": "-", "out": "", "status": "401"},
        )
        trace = Trace(written(tmp_path, "log", text), fields=self.FIELDS)
        assert list(trace) == [TrafficRequest(0, 374, 44), TrafficRequest(2, 20, 5)]
        assert trace.skipped_empty == 1

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ("23/Nov/2026:12:58:01 +0100", "23/Nov/2026:06:28:03 -0530"),
            ("1795435081.000", "1795435083.000"),
            (1795435081000, 1795435083000),
            ("1795435081000000000", "1795435083000000000"),
            (5, 7),
        ],
    )
    def test_times_in_all_spellings(self, tmp_path, first, second):
        text = lines({"time": first, "in": 3, "out": 2}, {"time": second, "in": 4, "out": 2})
        assert of(tmp_path, text, fields=self.FIELDS) == [TrafficRequest(0, 3, 2), TrafficRequest(2, 4, 2)]

    def test_fields_of_objects_within_and_of_csv(self, tmp_path):
        nested = lines({"a": {"b": 3}, "c.d": 4, "e": 1})
        fields = parse("prompt=a.b, output=c.d, cached=e")
        assert of(tmp_path, nested, fields=fields) == [TrafficRequest(0, 3, 4, 1)]
        table = "when;x,tok in,tok out\n1,5,6\n"
        assert of(tmp_path, table, fields=parse("prompt=tok in,output=tok out")) == [TrafficRequest(0, 5, 6)]

    def test_a_field_that_no_line_has(self, tmp_path):
        with pytest.raises(InputError, match="no line has the field 'inn'; the first has 'time, in, out'"):
            of(tmp_path, lines({"time": 1, "in": 3, "out": 2}), fields=parse("prompt=inn,output=out"))

    @pytest.mark.parametrize("value", ["3.5", "many", [1], True, -1])
    def test_what_is_no_length(self, tmp_path, value):
        with pytest.raises(InputError, match=r"line 2, field 'in': found .* not a number of tokens"):
            of(tmp_path, lines({"in": 3, "out": 2}, {"in": value, "out": 2}), fields=parse("prompt=in,output=out"))

    @pytest.mark.parametrize("text", ["", "prompt", "prompt=a", "prompt=a,output=b,x=c", "prompt=a,prompt=b,output=c"])
    def test_names_that_cannot_be_used(self, text):
        with pytest.raises(InputError, match="--fields"):
            parse(text)


def test_a_trace_of_dates_with_and_without_zones_is_refused(tmp_path):
    text = "time,prompt_tokens,output_tokens\n2023-11-16 18:15:46Z,1,1\n2023-11-16 18:15:47,1,1\n"
    with pytest.raises(InputError, match=r"line 3, column 'time': .* has no time zone, and the first time has one"):
        of(tmp_path, text)


def test_the_moment_of_a_trace_is_that_of_its_first_request(tmp_path):
    head = "time,prompt_tokens,output_tokens\n"
    for stamp, kind in (("2023-11-14T22:13:20Z", "utc"), ("2023-11-14 22:13:20", "local"), ("5", "relative")):
        trace = Trace(written(tmp_path, "t.csv", f"{head}{stamp},1,1\n"))
        assert len(list(trace)) == 1
        assert trace.start == ((5.0 if kind == "relative" else 1700000000.0), kind)


def test_the_logs_here_are_as_long_as_they_say():
    assert logs.received("a", 3, 0).count("[0, 1, 2]") == 1
