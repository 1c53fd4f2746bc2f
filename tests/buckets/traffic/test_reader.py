"""Traces of every known format become the same requests, streamed and again on each pass."""

from __future__ import annotations

import gzip
import hashlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.reader import Trace, TraceSummary
from llmc.buckets.traffic.recording import record_line
from tests.buckets.generators import PROPERTY
from tests.buckets.traffic.files import AZURE, SAMPLE, read, written
from tests.timing import least_cpu_seconds


def lengths(requests: list[TrafficRequest]) -> list[tuple[int, int, int]]:
    return [(request.prompt, request.output, request.cached) for request in requests]


def test_an_azure_trace(tmp_path):
    assert read(tmp_path, "trace.csv", AZURE) == [
        TrafficRequest(0.0, 374, 44),
        TrafficRequest(pytest.approx(4.314579), 396, 109),
        TrafficRequest(pytest.approx(14.541877), 879, 55),
    ]


def test_the_azure_sample():
    trace = Trace(SAMPLE)
    requests = list(trace)
    assert len(requests) == 1500
    assert requests[0] == TrafficRequest(0.0, 374, 44)
    assert trace.has_times
    assert trace.size == SAMPLE.stat().st_size
    assert [request.time for request in requests] == sorted(request.time for request in requests)
    assert list(trace) == requests


def test_a_burstgpt_trace_skips_and_counts_failed_requests(tmp_path):
    text = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45.5,ChatGPT,1087,0,1087,Conversation log\n"
        '118,GPT-4,417,276,693,"API log, batch"\n'
    )
    trace = Trace(written(tmp_path, "BurstGPT.csv", text))
    assert list(trace) == [TrafficRequest(0.0, 472, 18), TrafficRequest(113.0, 417, 276)]
    assert trace.skipped_empty == 1


def test_burstgpt_with_sessions_and_elapsed_times(tmp_path):
    text = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5.0,s-1,3.25,ChatGPT,472,18,490,Conversation log\n"
    )
    assert read(tmp_path, "BurstGPT_3.csv", text) == [TrafficRequest(0.0, 472, 18)]


def test_a_mooncake_trace_counts_milliseconds(tmp_path):
    text = (
        '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}\n'
        '{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 2353]}\n'
    )
    requests = read(tmp_path, "mooncake_trace.jsonl", text)
    assert requests == [TrafficRequest(0.0, 6955, 52), TrafficRequest(pytest.approx(3.053), 6472, 26)]


@pytest.mark.parametrize("key", ["time", "arrival_time", "Timestamp"])
def test_only_mooncakes_own_spelling_is_in_milliseconds(tmp_path, key):
    text = "".join(f'{{"{key}": {time}, "input_length": 8, "output_length": 2}}\n' for time in (10, 12))
    assert [request.time for request in read(tmp_path, "t.jsonl", text)] == [0.0, 2.0]


def test_a_recording_with_and_without_cached_tokens(tmp_path):
    text = (
        '{"time": 1.5, "prompt_tokens": 10, "output_tokens": 3}\n'
        '{"time": 2.5, "prompt_tokens": 20, "output_tokens": 4, "cached_tokens": 16}\n'
        '{"cached_tokens": null, "time": 3, "prompt_tokens": 30, "output_tokens": 5}\n'
    )
    assert read(tmp_path, "t.jsonl", text) == [
        TrafficRequest(0.0, 10, 3),
        TrafficRequest(1.0, 20, 4, 16),
        TrafficRequest(1.5, 30, 5),
    ]


@PROPERTY
@given(
    st.lists(
        st.builds(
            lambda time, prompt, output, cached: TrafficRequest(time, prompt, output, min(cached, prompt - 1)),
            st.integers(0, 10**6).map(lambda eighths: eighths / 8),
            st.integers(1, 2**31 - 1),
            st.integers(1, 2**31 - 1),
            st.integers(0, 50),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_what_is_recorded_reads_back(tmp_path_factory, requests):
    requests.sort()
    path = written(tmp_path_factory.mktemp("recorded"), "t.jsonl", "".join(map(record_line, requests)))
    start = requests[0].time
    assert list(Trace(path)) == [request._replace(time=request.time - start) for request in requests]


def test_a_recorded_line_is_one_line_of_json():
    assert record_line(TrafficRequest(1.5, 10, 3)) == '{"time": 1.5, "prompt_tokens": 10, "output_tokens": 3}\n'
    assert record_line(TrafficRequest(0.0, 10, 3, 4)).endswith('"cached_tokens": 4}\n')


@pytest.mark.parametrize(
    "header",
    [
        "prompt_tokens,completion_tokens",
        "Input Tokens,Output Tokens",
        "prompt_len,output_len",
        "num_prompt_tokens,num_output_tokens",
        "INPUT_LENGTH,OUTPUT-LENGTH",
        " inputTokens , responseLength ",
        "num_prefill_tokens,num_decode_tokens",
    ],
)
def test_the_usual_spellings_are_understood(tmp_path, header):
    assert lengths(read(tmp_path, "t.csv", f"{header}\n7,3\n")) == [(7, 3, 0)]


def test_a_trace_without_times_has_all_at_zero(tmp_path):
    trace = Trace(written(tmp_path, "t.csv", "input_tokens,output_tokens,model\n7,3,a\n8,2,b\n"))
    assert not trace.has_times
    assert [request.time for request in trace] == [0.0, 0.0]
    assert trace.summary().rate is trace.summary().duration is None


def test_requests_come_in_order_of_time_whatever_their_order_in_the_file(tmp_path):
    """A server records a request when it ends."""
    times = [(10, 1), (12, 2), (11, 3), (5, 4), (12, 5), (13, 6)]
    text = "time,input_tokens,output_tokens\n" + "".join(f"{time},{length},1\n" for time, length in times)
    trace = Trace(written(tmp_path, "t.csv", text))
    assert [(request.time, request.prompt) for request in trace] == [(0, 4), (5, 1), (6, 3), (7, 2), (7, 5), (8, 6)]
    assert trace.out_of_order == 0


def test_a_request_that_is_far_too_late_in_the_file_is_raised_to_the_one_before(tmp_path, monkeypatch):
    monkeypatch.setattr("llmc.buckets.traffic.reader.REORDERED", 2)
    text = "time,input_tokens,output_tokens\n" + "".join(f"{time},1,1\n" for time in (10, 12, 13, 5, 14, 15))
    trace = Trace(written(tmp_path, "t.csv", text))
    assert [request.time for request in trace] == [0, 0, 2, 3, 4, 5]
    assert trace.out_of_order == 1


def test_bom_carriage_returns_and_blank_lines_are_tolerated(tmp_path):
    plain = read(tmp_path, "plain.csv", AZURE)
    messy = "\n\r\n" + AZURE.replace("\n", "\r\n").replace("879", " 879 ") + "  \r\n\r\n"
    assert read(tmp_path, "messy.csv", b"\xef\xbb\xbf" + messy.encode()) == plain
    record = '{"prompt_tokens": 5, "output_tokens": 2}'
    assert lengths(read(tmp_path, "t.jsonl", b"\xef\xbb\xbf\r\n \n" + f"{record}\r\n\n{record}".encode())) == [
        (5, 2, 0),
        (5, 2, 0),
    ]


def test_whole_numbers_may_be_written_as_decimals_and_cached_may_be_empty(tmp_path):
    text = "prompt_tokens,output_tokens,cached_tokens\n7.0,3,\n8,2e0,4\n9,1,0,\n"
    assert lengths(read(tmp_path, "t.csv", text)) == [(7, 3, 0), (8, 2, 4), (9, 1, 0)]
    assert lengths(read(tmp_path, "t.jsonl", '{"input_len": 7.0, "output_len": "3"}')) == [(7, 3, 0)]


def test_a_wholly_cached_prompt_computes_its_last_token(tmp_path):
    text = "prompt_tokens,output_tokens,cached_tokens\n7,3,7\n"
    assert lengths(read(tmp_path, "t.csv", text)) == [(7, 3, 6)]


@pytest.mark.parametrize("name", ["trace", "trace.log", "trace.2024", "TRACE.GZ", "trace.txt.gz"])
def test_the_first_character_reports_where_the_extension_does_not(tmp_path, name):
    for text in (AZURE, '\n {"prompt_tokens": 374, "output_tokens": 44}\n'):
        data = gzip.compress(text.encode()) if name.lower().endswith(".gz") else text.encode()
        assert lengths(read(tmp_path, name, data))[0] == (374, 44, 0)


@pytest.mark.parametrize("name", ["t.json", "t.ndjson", "t.JSONL", "t.jsonl.gz", "a.csv.json.gz"])
def test_extensions_of_json_lines(tmp_path, name):
    data = b'{"prompt_tokens": 5, "output_tokens": 2}\n'
    assert lengths(read(tmp_path, name, gzip.compress(data) if name.endswith("gz") else data)) == [(5, 2, 0)]


def test_a_compressed_trace_reads_the_same_whatever_its_name(tmp_path):
    data = gzip.compress(SAMPLE.read_bytes())
    plain = list(Trace(SAMPLE))
    assert read(tmp_path, "sample.csv.gz", data) == plain
    assert read(tmp_path, "sample.csv", data) == plain


def test_iterations_are_independent(tmp_path):
    trace = Trace(written(tmp_path, "t.csv", AZURE))
    first = iter(trace)
    kept = [next(first)]
    whole = list(trace)
    assert kept + list(first) == whole
    assert list(itertools.islice(trace, 1)) == whole[:1]


def test_the_summary_of_a_trace(tmp_path, monkeypatch):
    monkeypatch.setattr("llmc.buckets.traffic.reader.REORDERED", 0)
    text = "time,prompt_tokens,output_tokens,cached_tokens\n5,10,4,2\n4,30,0,0\n4,20,1,3\n9,12,9,0\n"
    assert Trace(written(tmp_path, "t.csv", text)).summary() == TraceSummary(
        requests=3,
        skipped_empty=1,
        out_of_order=1,
        duration=4.0,
        rate=0.5,
        prompt_tokens=42,
        output_tokens=14,
        cached_tokens=5,
        longest_prompt=20,
        longest_output=9,
        longest_total=21,
    )


def test_requests_that_all_arrive_at_once_have_no_rate(tmp_path):
    summary = Trace(written(tmp_path, "t.csv", "time,input_tokens,output_tokens\n5,1,1\n5,1,1\n")).summary()
    assert (summary.duration, summary.rate) == (0.0, None)


def test_the_digest_is_of_the_bytes_as_stored(tmp_path):
    data = gzip.compress(AZURE.encode())
    trace = Trace(written(tmp_path, "t.csv.gz", data))
    assert trace.digest() == hashlib.sha256(data).hexdigest()
    assert trace.size == len(data)


@pytest.mark.parametrize("compressed", [False, True])
def test_progress_counts_stored_bytes_up_to_the_size(tmp_path, compressed):
    data = b"prompt_tokens,output_tokens,note\n" + b"".join(b"5,2,%064x\n" % i**9 for i in range(20_000))
    path = written(tmp_path, "t.csv", gzip.compress(data, 1) if compressed else data)
    calls: list[int] = []
    trace = Trace(path, progress=calls.append)
    assert not calls
    assert sum(1 for _ in trace) == 20_000
    assert calls == sorted(calls)
    assert len(calls) > 3
    assert calls[-1] == trace.size


def test_an_error_of_the_progress_report_is_not_the_traces(tmp_path):
    def report(_: int) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        list(Trace(written(tmp_path, "t.csv", AZURE), progress=report))


def test_a_trace_of_twenty_thousand_requests_reads_at_once(tmp_path):
    head, *rows = SAMPLE.read_text().splitlines(keepends=True)
    trace = Trace(written(tmp_path, "t.csv", head + "".join(rows) * 13))
    assert sum(1 for _ in trace) == 19_500
    assert least_cpu_seconds(lambda: list(trace), 3) < 1.0
