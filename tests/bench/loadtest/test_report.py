"""The figures, from outcomes whose times are known exactly."""

from __future__ import annotations

import json

import pytest

from llmc.bench.loadtest import slo
from llmc.bench.loadtest.outcome import Failure, Outcome
from llmc.bench.loadtest.report import Distribution, make_report, peak
from llmc.bench.loadtest.report_text import text
from llmc.errors import InputError


def answered(index: int, due: float, first: float, gap: float, count: int, **more: object) -> Outcome:
    """Sent when due; text after `first` seconds and then each `gap`; whole with the last."""
    times = [due + first + i * gap for i in range(count)]
    found = Outcome(index, due, 10, count, sent_s=due, connected_s=due + 0.001, text_s=times, ended_s=times[-1])
    for name, value in more.items():
        setattr(found, name, value)
    return found


def failed(index: int, due: float, took: float, failure: Failure) -> Outcome:
    return Outcome(index, due, 10, 4, sent_s=due, ended_s=due + took, failure=failure)


def test_a_distribution_is_linear_between_values() -> None:
    found = Distribution.of([0.1 * i for i in range(11)])
    assert found is not None
    assert found.count == 11
    assert (found.mean, found.p50, found.p90, found.p95) == pytest.approx((0.5, 0.5, 0.9, 0.95))
    assert (found.p99, found.max) == pytest.approx((0.99, 1.0))


def test_values_that_are_not_there_do_not_count() -> None:
    assert Distribution.of([None, None]) is None
    one = Distribution.of([None, 2.0])
    assert one is not None and (one.count, one.mean) == (1, 2.0)


def test_the_figures_of_a_run() -> None:
    outcomes = [
        answered(0, 0.0, 0.1, 0.02, 5, prompt_tokens=12, output_tokens=5, cached_tokens=4),
        answered(1, 0.5, 0.3, 0.04, 3, prompt_tokens=8, output_tokens=5),
        failed(2, 0.6, 0.01, Failure("http 503", "queue full", 2.0)),
        failed(3, 0.7, 0.03, Failure("http 503", "queue full", 1.0)),
        failed(4, 0.8, 1.2, Failure("truncated", "broke off")),
    ]
    report = make_report(outcomes)
    assert (report.requests, report.ok, report.refused, report.failed) == (5, 2, 2, 1)
    assert report.duration_s == pytest.approx(2.0)
    assert report.request_rate == pytest.approx(1.0)
    assert (report.prompt_tokens, report.output_tokens, report.cached_tokens) == (20, 10, 4)
    assert report.output_rate == pytest.approx(5.0)
    assert report.total_rate == pytest.approx(15.0)
    means = {name: d.mean for name, d in report.latency.items() if d}
    assert means["ttft"] == pytest.approx(0.2)
    assert means["itl"] == pytest.approx((4 * 0.02 + 2 * 0.04) / 6)
    assert means["tpot"] == pytest.approx((0.02 + 0.08 / 4) / 2)  # two pieces held more than a token
    assert means["e2e"] == pytest.approx((0.18 + 0.38) / 2)
    assert means["connect"] == pytest.approx(0.001)
    assert report.refusal is not None and report.refusal.mean == pytest.approx(0.02)
    assert report.retry_after_s == (1.0, 2.0)
    assert [(e.kind, e.count, e.example) for e in report.errors] == [
        ("http 503", 2, "queue full"),
        ("truncated", 1, "broke off"),
    ]
    assert report.counted


def test_latencies_count_from_when_a_request_was_due() -> None:
    late = Outcome(0, 1.0, 10, 2, sent_s=1.4, text_s=[1.5, 1.6], ended_s=1.6)
    report = make_report([late])
    assert report.latency["ttft"] == Distribution(1, *[pytest.approx(0.5)] * 6)
    assert report.latency["e2e"] == Distribution(1, *[pytest.approx(0.6)] * 6)
    assert report.late_p99_s == pytest.approx(0.4)
    assert "this client sent late: up to 400 ms" in text(report)


def test_without_usage_pieces_count_as_tokens() -> None:
    report = make_report([answered(0, 0.0, 0.1, 0.1, 4)])
    assert (report.prompt_tokens, report.output_tokens, report.counted) == (10, 4, False)
    assert "no usage" in text(report)


def test_one_token_has_no_time_between_tokens() -> None:
    report = make_report([answered(0, 0.0, 0.1, 0.1, 1, output_tokens=1)])
    assert report.latency["itl"] is None and report.latency["tpot"] is None
    assert "TPOT" not in text(report)


def test_peak_concurrency_counts_what_is_sent_and_not_ended() -> None:
    spans = [(0.0, 1.0), (0.5, 2.0), (0.9, 1.5), (1.0, 1.2), (3.0, 4.0)]
    assert peak([Outcome(i, a, 1, 1, sent_s=a, ended_s=b) for i, (a, b) in enumerate(spans)]) == 3


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    outcomes = [
        answered(0, 0.0, 0.1, 0.02, 5),
        answered(1, 0.0, 0.3, 0.02, 5),  # first token too late
        answered(2, 0.0, 0.1, 0.06, 5),  # gaps too long
        failed(3, 0.0, 1.0, Failure("timeout", "")),
    ]
    limits = slo.parse("ttft=200ms, itl=0.05s")
    assert limits == {"ttft": 0.2, "itl": 0.05}
    goodput = make_report(outcomes, objectives=limits).goodput
    assert goodput is not None
    assert (goodput.requests, goodput.share, goodput.per_second) == (1, 0.25, pytest.approx(1.0))
    assert "1 of 4 (25.0%) kept ttft ≤ 200 ms, itl ≤ 50 ms" in text(make_report(outcomes, objectives=limits))


def test_itl_of_a_request_is_its_longest_gap() -> None:
    stalled = Outcome(0, 0.0, 1, 3, text_s=[0.1, 0.11, 0.5], ended_s=0.5)
    assert not slo.meets(stalled, {"itl": 0.3})
    assert slo.meets(stalled, {"itl": 0.4, "tpot": 0.21, "e2e": 0.5})
    assert not slo.meets(stalled, {"tpot": 0.19})
    assert not slo.meets(stalled, {"e2e": 0.49})


@pytest.mark.parametrize("wrong", ["", "ttft", "ttft=1", "speed=1s", "ttft=1s,ttft=2s", "ttft=-1s", "ttft=1m"])
def test_objectives_are_checked(wrong: str) -> None:
    with pytest.raises(InputError, match="--slo"):
        slo.parse(wrong)


def test_the_document_is_json_and_has_every_request_when_asked() -> None:
    report = make_report([answered(1, 0.2, 0.1, 0.1, 2), failed(0, 0.1, 0.1, Failure("timeout", "slow"))])
    document = json.loads(json.dumps(report.to_dict(each=True)))
    assert document["version"] == 1
    assert document["latency"]["ttft"]["p50"] == pytest.approx(0.1)
    assert [one["index"] for one in document["each"]] == [0, 1]
    assert document["each"][0]["failure"] == {"kind": "timeout", "message": "slow", "retry_after_s": None}
    assert document["each"][1]["text_s"] == pytest.approx([0.3, 0.4])
    assert "each" not in report.to_dict()


def test_the_text_says_what_to_beware_of() -> None:
    short = answered(0, 0.0, 0.1, 0.1, 2, prompt_tokens=10, output_tokens=2, asked_output=8)
    said = text(make_report([short, failed(1, 0.0, 0.1, Failure("http 429", "slow down"))], client_cpu=0.9))
    assert "answers had 2 tokens where the workload asks for 8 (25%)" in said
    assert "prompts had" not in said
    assert "did not say when to come again" in said
    assert "used 90% of a core" in said
    assert "http 429" in said and "slow down" in said
