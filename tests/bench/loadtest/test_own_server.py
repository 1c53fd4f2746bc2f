"""The load test against llmc's own server, over the toy bundle: 4 sequences of at most 32 tokens, a token a byte."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmc.bench.loadtest.report import Report
from llmc.bench.loadtest.run import LoadTest, run
from llmc.bench.loadtest.workload import Workload
from tests.server.live import Live, toy_bundle


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with Live(toy_bundle(tmp_path_factory.mktemp("toy")), max_queued_requests=64) as server:
        yield server.ready()


def load(live: Live, workload: Workload, **test: Any) -> Report:
    return run(LoadTest(live.server.listener.url, workload, **test))


def test_tokens_are_what_was_asked_for(live: Live) -> None:
    report = load(live, Workload(requests=24, concurrency=6, prompt_len=(3, 20), output_len=(2, 12)), prompt_ids=True)
    assert (report.ok, report.counted) == (24, True)
    assert report.prompt_tokens == report.asked_prompt_tokens
    assert report.output_tokens == report.asked_output_tokens
    assert all(o.ttft_s is not None and 0 < o.ttft_s <= o.e2e_s for o in report.outcomes)


def test_a_trace_cut_to_the_model_fits(live: Live) -> None:
    azure = Path(__file__).parents[2] / "data" / "azure_conv_sample.csv"
    workload = Workload(requests=40, traffic=azure, scale=1 / 32, max_model_len=32, rate=math.inf)
    report = load(live, workload, prompt_ids=True)
    assert (report.ok, report.failed) == (40, 0)
    assert report.peak_concurrency > 4


def test_what_the_queue_has_no_room_for_is_refused_at_once(tmp_path: Path) -> None:
    workload = Workload(requests=100, rate=math.inf, prompt_len=(8, 8), output_len=(20, 20))
    with Live(toy_bundle(tmp_path), max_queued_requests=1) as small:
        report = load(small.ready(), workload, prompt_ids=True)
    assert (report.ok + report.refused, report.failed) == (100, 0)
    assert report.ok >= 5 and report.refused > 0
    assert report.retry_after_s is not None and report.retry_after_s[0] > 0
