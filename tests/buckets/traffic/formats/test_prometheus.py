"""Histograms of lengths: one scrape, several, a query's JSON, a live server; and everything that is wrong with them."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.traffic.formats.prometheus import live, scrape
from llmc.buckets.traffic.formats.prometheus.names import histograms, series
from llmc.buckets.traffic.length_histogram import Interval, LengthHistogram, Lengths
from llmc.buckets.traffic.reader import Trace
from llmc.buckets.traffic.trace_file import TraceFile
from llmc.errors import InputError
from tests.buckets.generators import PROPERTY
from tests.buckets.traffic.files import written
from tests.buckets.traffic.formats import logs

ONE = logs.scrape([3, 2, 1], [4, 1, 0])


def of(folder, *scrapes: str) -> Lengths:
    return scrape.Scrape().lengths(TraceFile(written(folder, "m.prom", "".join(scrapes))))


def test_one_scrape_is_all_since_the_server_started(tmp_path):
    found = of(tmp_path, ONE)
    assert found.prompt.intervals == (Interval(1, 10, 3), Interval(11, 100, 2), Interval(101, None, 1))
    assert found.prompt.total == 15 + 80 + 150
    assert found.output.intervals == (Interval(1, 10, 4), Interval(11, 100, 1))
    assert found.requests == 6 and found.duration is None
    assert "everything since the server started" in found.notes[0]


def test_of_several_scrapes_what_came_in_between_counts(tmp_path):
    found = of(tmp_path, ONE, logs.scrape([4, 2, 1], [5, 1, 0]), logs.scrape([5, 5, 1], [6, 3, 0]))
    assert found.prompt.intervals == (Interval(1, 10, 2), Interval(11, 100, 3))
    assert found.prompt.total == 2 * 5 + 3 * 40
    assert found.requests == 5 and found.notes == ()


def test_prompt_tokens_from_the_prefix_cache_are_reported(tmp_path):
    """As vLLM 0.32 names them; older releases have only the second counter. Counters by source repeat the first."""
    both = 'vllm:prompt_tokens_cached_total{{engine="0"}} {}\nvllm:prefix_cache_hits_total{{engine="0"}} {}\n'
    by_source = 'vllm:prompt_tokens_cached_by_source_total{engine="0",source="device"} 3\n'
    note = "{} of {} prompt tokens came from the prefix cache; which requests had them is not known"
    assert of(tmp_path, ONE + both.format(30, 31) + by_source).notes[0] == note.format(30, 245)
    assert of(tmp_path, ONE + 'vllm:prefix_cache_hits_total{engine="0"} 7\n').notes[0] == note.format(7, 245)
    assert len(of(tmp_path, ONE + both.format(0, 0)).notes) == 1
    later = logs.scrape([4, 2, 1], [5, 1, 0])
    assert of(tmp_path, ONE + both.format(30, 31), later + both.format(34, 35)).notes == (note.format(4, 5),)


def test_a_restart_between_scrapes_counts_from_zero(tmp_path):
    found = of(tmp_path, logs.scrape([50, 9, 9], [50, 9, 9]), logs.scrape([2, 1, 0], [2, 1, 0]))
    assert found.prompt.intervals == (Interval(1, 10, 2), Interval(11, 100, 1))
    assert found.notes == ("counters were reset 2 times, as by a restart; what came after it counts from 0",)


def test_servers_are_added_up_and_models_are_named(tmp_path):
    other = logs.scrape([1, 0, 0], [1, 0, 0], labels='model_name="n",engine="1"')
    found = of(tmp_path, ONE, other)
    assert found.requests == 7
    assert found.notes[-1] == "2 models are added up: m, n"


def test_servers_with_other_buckets_are_not(tmp_path):
    other = logs.scrape([1, 0, 0], [1, 0, 0], labels='engine="1"').replace('le="100.0"', 'le="50.0"')
    with pytest.raises(InputError, match="servers count the prompt tokens in different buckets"):
        of(tmp_path, ONE, other)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('_prompt_tokens_bucket{model_name="m",le="+Inf"} 6.0', "", r'has no bucket le="\+Inf"'),
        ('le="100.0"} 5.0', 'le="100.0"} 2.0', "2 lengths are at most 100, but 3 at most 10; such counts do not fall"),
        ('le="10.0"', 'le="ten"', 'whose bound le="ten" is not a length'),
        ("_generation_tokens", "_gen", "no histogram of the output tokens; known are .*vllm:request_prompt_tokens, "),
    ],
)
def test_a_histogram_that_is_none(tmp_path, before, after, message):
    assert before in ONE
    with pytest.raises(InputError, match=message):
        of(tmp_path, ONE.replace(before, after))


def test_no_request_in_between(tmp_path):
    with pytest.raises(InputError, match="has a request between the first scrape and the last; wait for traffic"):
        of(tmp_path, ONE, ONE)


def test_more_series_than_any_server_has(tmp_path, monkeypatch):
    monkeypatch.setattr("llmc.buckets.traffic.formats.prometheus.increase.MAX_SERIES", 8)
    with pytest.raises(InputError, match="more than 8 series"):
        of(tmp_path, ONE)


def test_names_of_other_servers_and_of_opentelemetry():
    for name, role in histograms().items():
        found = series(f"{name}_bucket", {})
        assert found is not None and found.role == role
    usage = series("gen_ai_client_token_usage_bucket", {"gen_ai_token_type": "input"})
    assert usage is not None and usage.role == "prompt"
    assert series("gen_ai_client_token_usage_bucket", {"gen_ai_token_type": "cache"}) is None
    assert series("vllm:request_prompt_tokens_created", {}) is None


def test_what_is_sampled_reads_back(tmp_path):
    first = of(tmp_path, ONE, logs.scrape([5, 2, 8], [6, 3, 6]))
    timed = Lengths(first.prompt, first.output, 60.0)
    again = of(tmp_path, scrape.text(timed))
    assert (again.prompt, again.output, again.duration) == (first.prompt, first.output, 60.0)


@PROPERTY
@given(
    st.lists(st.tuples(st.integers(1, 10_000), st.integers(0, 50)), min_size=1, unique_by=lambda pair: pair[0]),
    st.integers(1, 9),
)
def test_any_histogram_reads_back(tmp_path_factory, pairs, beyond):
    cumulative, count = {}, 0
    for bound, number in sorted(pairs):
        count += number
        cumulative[float(bound)] = float(count)
    cumulative[math.inf] = float(count + beyond)
    histogram = LengthHistogram.of(cumulative, None, "x")
    assert histogram.number == count + beyond
    again = of(tmp_path_factory.mktemp("h"), scrape.text(Lengths(histogram, histogram)))
    assert again.prompt == again.output == histogram


class TestApi:
    def answer(self, *points: tuple[float, list[int]], **more: object) -> str:
        result = []
        for name in ("prompt", "generation"):
            for index, le in enumerate(("10.0", "100.0", "+Inf")):
                values = [[at, str(sum(counts[: index + 1]))] for at, counts in points]
                metric = {"__name__": f"vllm:request_{name}_tokens_bucket", "le": le, "model_name": "m"}
                result.append({"metric": metric, "values": values, **more})
        return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}})

    def test_a_range_is_what_was_counted_from_its_first_point_to_its_last(self, tmp_path):
        text = self.answer((100, [1, 0, 0]), (160.5, [4, 1, 0]), (200, [1, 1, 0]))
        trace = Trace(written(tmp_path, "q.json", text))
        assert trace.lengths is not None
        assert trace.lengths.prompt.intervals == (Interval(1, 10, 4), Interval(11, 100, 2))
        assert trace.lengths.duration == 100
        assert len(list(trace)) == 6 and trace.has_times

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('{"status":"success","data":{"resultType":"matrix","result":[]}}', "no series of token histograms"),
            ('{"status":"error","error":"bad query"}', "Prometheus refused the query: bad query"),
            ('{"status":"success","data":{"result":[{"metric":{},"val', "not valid JSON"),
            ('{"status":"success","data":{"result":3}}', "is not the answer to a Prometheus query"),
            (
                '{"status":"success","data":{"result":[{"metric":{"__name__":"x_sum"},"values":[3]}]}}',
                "no series of token",
            ),
        ],
    )
    def test_answers_that_tell_nothing(self, tmp_path, text, message):
        with pytest.raises(InputError, match=message):
            Trace(written(tmp_path, "q.json", text))

    def test_native_histograms_and_damaged_values(self, tmp_path):
        with pytest.raises(InputError, match="native histograms, which are not read"):
            Trace(written(tmp_path, "q.json", self.answer((1, [1, 1, 1]), histograms=[])))
        with pytest.raises(InputError, match="whose values are not pairs"):
            Trace(written(tmp_path, "q.json", self.answer((1, [1, 1, 1])).replace('[1, "1"]', '["1"]')))

    def test_an_answer_of_hostile_size(self, tmp_path, monkeypatch):
        monkeypatch.setattr("llmc.buckets.traffic.formats.prometheus.api.MAX_BYTES", 100)
        with pytest.raises(InputError, match="holds more than 0 MiB; ask for a shorter range"):
            Trace(written(tmp_path, "q.json", self.answer((1, [1, 1, 1]))))


@contextmanager
def serving(*answers: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server at the URL that gives one answer to each connection, the last one again and again."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.05)
        done = threading.Event()

        def run() -> None:
            index = 0
            while not done.is_set():
                try:
                    connection, _ = listening.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.recv(4096)
                    answers[min(index, len(answers) - 1)](connection)
                index += 1

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/metrics"
        finally:
            done.set()
            thread.join()


def answer(text: str, status: str = "200 OK") -> Callable[[socket.socket], None]:
    def send(connection: socket.socket) -> None:
        body = text.encode()
        connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    return send


class TestLive:
    def test_a_sample_is_what_came_in_between(self):
        reports = []
        with serving(answer(ONE), answer(logs.scrape([5, 2, 1], [6, 1, 0]))) as url:
            found = live.sample(url, 0.02, 0.02, lambda *report: reports.append(report))
        assert found.prompt.intervals == (Interval(1, 10, 2),)
        assert found.duration is not None and found.duration >= 0.02
        assert reports[-1] == (0.02, 0.02, 2)

    @pytest.mark.parametrize("end", [KeyboardInterrupt(), InputError("the server has gone")])
    def test_what_ends_before_its_time_keeps_what_it_has(self, monkeypatch, end):
        answers = iter([ONE, logs.scrape([5, 2, 1], [6, 1, 0]), end])

        def fetch(*_):
            if isinstance(found := next(answers), BaseException):
                raise found
            return found

        monkeypatch.setattr(live, "fetch", fetch)
        found = live.sample("http://x", 60, 1, sleep=lambda _: None)
        assert found.prompt.intervals == (Interval(1, 10, 2),)
        assert "of 60 seconds are kept" in found.notes[-1]
        answers = iter([ONE, end])
        with pytest.raises(type(end)):
            live.sample("http://x", 60, 1, sleep=lambda _: None)

    def test_a_server_that_hangs(self):
        released = threading.Event()
        with serving(lambda connection: released.wait(5) and None) as url:
            with pytest.raises(InputError, match=r"did not answer within 0.05 seconds"):
                live.fetch(url, 0.05)
            released.set()

    def test_a_server_that_never_ends(self):
        def drip(connection: socket.socket) -> None:
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            try:
                while True:
                    connection.sendall(b"# a\n")
            except OSError:
                return

        with serving(drip) as url, pytest.raises(InputError, match=r"did not answer within|more than"):
            live.fetch(url, 0.05)

    def test_an_answer_of_megabytes(self, monkeypatch):
        monkeypatch.setattr(live, "MAX_ANSWER_BYTES", 1 << 16)
        with serving(answer("#" * (1 << 18))) as url, pytest.raises(InputError, match="answered more than 0 MiB"):
            live.fetch(url)

    def test_an_error_or_no_server(self):
        with serving(answer("no", "404 Not Found")) as url, pytest.raises(InputError, match="answered 404 Not Found"):
            live.fetch(url)
        with pytest.raises(InputError, match=r"cannot be read: .*; is the server running\?"):
            live.fetch(url)

    def test_an_answer_that_is_no_http(self):
        with (
            serving(lambda connection: connection.sendall(b"hello\r\n\r\n")) as url,
            pytest.raises(InputError, match="cannot"),
        ):
            live.fetch(url)

    @pytest.mark.parametrize("url", ["file:///etc/passwd", "http://", "http://x:port/", "http://[::1"])
    def test_what_is_no_url_of_a_server(self, url):
        with pytest.raises(InputError, match=r"is not (a|the) URL"):
            live.fetch(url)

    def test_only_http_is_a_url(self):
        assert live.is_url("http://x") and live.is_url("https://x")
        assert not live.is_url("http") and not live.is_url("s3://x") and not live.is_url("a.csv")
