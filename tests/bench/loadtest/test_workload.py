"""What is asked, when, and with which prompts."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev

import pytest

from llmc.bench.loadtest.prompts import WORDS, Calibration, Prompts
from llmc.bench.loadtest.workload import Workload, send_times
from llmc.errors import InputError

AZURE = Path(__file__).parents[2] / "data" / "azure_conv_sample.csv"
TRACE = "time,prompt_tokens,output_tokens\n5,80,40\n6,8,4\n9,2,1\n"


def gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in pairwise(times)]


def test_uniform_arrivals_are_even() -> None:
    assert send_times(4, 2.0, "uniform") == [0.0, 0.5, 1.0, 1.5]


def test_poisson_arrivals_have_the_rate_and_its_spread() -> None:
    times = send_times(20_000, 5.0, seed=1)
    assert times[0] == 0.0 and times == sorted(times)
    assert mean(gaps(times)) == pytest.approx(0.2, rel=0.03)
    assert pstdev(gaps(times)) == pytest.approx(0.2, rel=0.05)
    assert times == send_times(20_000, 5.0, seed=1) != send_times(20_000, 5.0, seed=2)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_changes_the_spread_and_not_the_rate(burstiness: float) -> None:
    found = gaps(send_times(20_000, 5.0, burstiness=burstiness))
    assert mean(found) == pytest.approx(0.2, rel=0.06)
    assert pstdev(found) == pytest.approx(0.2 / math.sqrt(burstiness), rel=0.06)


def test_an_infinite_rate_is_all_at_once() -> None:
    assert send_times(3, math.inf) == [0.0, 0.0, 0.0]


def test_drawn_lengths_are_in_their_ranges_and_repeat() -> None:
    workload = Workload(requests=500, prompt_len=(3, 9), output_len=(2, 2), seed=4)
    asks = workload.asks()
    assert {ask.prompt for ask in asks} == set(range(3, 10))
    assert {ask.output for ask in asks} == {2}
    assert {ask.due_s for ask in asks} == {None}
    assert asks == workload.asks() != Workload(requests=500, prompt_len=(3, 9), output_len=(2, 2), seed=5).asks()


def test_a_trace_gives_lengths_and_times(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(TRACE)
    found = Workload(requests=3, traffic=tmp_path / "t.csv", rate="trace", speedup=2.0).asks()
    assert found == [(0.0, 80, 40), (0.5, 8, 4), (2.0, 2, 1)]
    assert Workload(requests=2, traffic=tmp_path / "t.csv").asks() == [(None, 80, 40), (None, 8, 4)]
    assert Workload(requests=2, traffic=tmp_path / "t.csv", rate=4.0, arrivals="uniform").asks()[1].due_s == 0.25


def test_lengths_of_a_trace_are_scaled_and_then_cut_to_the_model(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(TRACE)
    found = Workload(requests=3, traffic=tmp_path / "t.csv", scale=0.25, max_model_len=24).asks()
    assert found == [(None, 20, 4), (None, 2, 1), (None, 1, 1)]


def test_the_azure_sample_scaled_to_an_eighth() -> None:
    asks = Workload(requests=1000, traffic=AZURE, scale=1 / 8, max_model_len=512, rate="trace").asks()
    assert len(asks) == 1000
    assert all(ask.prompt + ask.output <= 512 for ask in asks)
    assert asks[0] == (0.0, round(374 / 8), round(44 / 8))


def test_a_trace_that_is_too_short_or_has_no_times_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(TRACE)
    with pytest.raises(InputError, match="has 3 requests; ask for --requests 3"):
        Workload(requests=4, traffic=tmp_path / "t.csv").asks()
    (tmp_path / "u.csv").write_text("prompt_tokens,output_tokens\n8,4\n")
    with pytest.raises(InputError, match="no times"):
        Workload(requests=1, traffic=tmp_path / "u.csv", rate="trace").asks()


def test_a_workload_describes_itself() -> None:
    assert Workload().describe() == "closed loop, 8 at a time"
    assert Workload(rate=math.inf).describe() == "open loop, all at once"
    assert Workload(rate=4.0).describe() == "open loop, 4 requests/s (poisson)"
    assert Workload(rate="trace", speedup=3).describe() == "open loop, at the trace's times, 3× as fast"


def test_prompts_have_the_wanted_words_and_nothing_else_in_common() -> None:
    prompts = Prompts(seed=1)
    made = [prompts.make(i, 50) for i in range(20)]
    assert all(isinstance(p, str) and len(p.split()) == 50 and set(p.split()) <= set(WORDS) for p in made)
    assert len(set(made)) == 20
    assert made[3] == Prompts(seed=1).make(3, 50) != Prompts(seed=2).make(3, 50)
    starts = {" ".join(str(p).split()[:3]) for p in made}
    assert len(starts) > 15


def test_a_shared_prefix_is_shared_by_prompts_of_any_length() -> None:
    prompts = Prompts(shared=0.5)
    a, b = str(prompts.make(0, 40)).split(), str(prompts.make(1, 20)).split()
    assert a[:10] == b[:10]
    assert a[:20] != b[:20]
    assert (len(a), len(b)) == (40, 20)


def test_prompts_of_ids_are_exact() -> None:
    made = Prompts(ids=[5, 6, 7], shared=0.25).make(0, 33)
    assert isinstance(made, list) and len(made) == 33 and set(made) <= {5, 6, 7}


def test_calibration_finds_what_a_server_adds() -> None:
    found = Calibration.fit((1, 12), (65, 140))
    assert (found.per_word, found.added) == (2.0, 10.0)
    assert found.words(110) == 50
    assert found.words(3) == 1


def test_words_are_distinct() -> None:
    assert len(WORDS) == len(set(WORDS)) > 100
