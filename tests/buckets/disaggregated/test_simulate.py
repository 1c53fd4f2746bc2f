"""One device and a pipeline of two, request by request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.disaggregated.comparison import compare
from llmc.buckets.disaggregated.device import APART, Link, Sharing, Stage
from llmc.buckets.disaggregated.simulate import alone, pipeline
from llmc.buckets.disaggregated.steady import steady
from llmc.buckets.traffic.events import TrafficRequest
from llmc.errors import InputError
from tests.buckets.disaggregated.devices import links, requests, stage, stages, traffic
from tests.tiers import full

SLOW = Link(1000, 0.001, latency_s=0.5)


def test_one_request_takes_its_prompt_the_hand_over_and_its_decode_steps() -> None:
    """Prompt 10 + 100 ms, hand-over 500 + 100 ms, two decode steps of 11 ms."""
    found = pipeline(requests(1, 100, 3), stage(), stage(), SLOW, 4, APART)
    assert found.first_token_s == pytest.approx((0.11 + 0.5 + 0.1,))
    assert found.seconds == pytest.approx(0.11 + 0.6 + 2 * 0.011)
    assert alone(requests(1, 100, 3), stage(), 4).seconds == pytest.approx(0.11 + 2 * 0.011)


@given(traffic, stages, stages, links, st.integers(1, 8), st.booleans(), st.integers(1, 4))
def test_every_request_is_served_and_no_device_works_longer_than_the_run_takes(
    given_: list[TrafficRequest], x: Stage, y: Stage, link: Link, slots: int, shared: bool, bound: int
) -> None:
    for found in (alone(given_, x, slots), pipeline(given_, x, y, link, slots, Sharing(shared), bound)):
        assert found.requests == len(found.first_token_s) == len(given_)
        assert found.tokens == sum(request.output for request in given_)
        assert max(found.prefill_s, found.decode_s) <= found.seconds * (1 + 1e-9)
        assert min(found.first_token_s) > 0
    whole = found.prefill_s + found.decode_s + found.moving_s
    assert not shared or found.seconds >= whole * (1 - 1e-9), "one machine does the work of both"


@full
@given(stages, stages, links, st.integers(1, 300), st.integers(1, 60), st.integers(1, 8), st.booleans())
def test_with_work_always_there_it_comes_to_the_closed_form(
    x: Stage, y: Stage, link: Link, prompt: int, output: int, slots: int, shared: bool
) -> None:
    """Never beyond it: batches fill up at first, and drain in the end."""
    many = requests(40 * slots, prompt, output)
    expected = steady(x, y, link, prompt, output, slots, Sharing(shared))
    assert alone(many, x, slots).requests_per_s <= expected.prefill_alone * 1.02
    found = pipeline(many, x, y, link, slots, Sharing(shared), bound=2 * slots).requests_per_s
    assert found <= expected.disaggregated * 1.02


def test_a_saturated_pipeline_reaches_its_slower_stage() -> None:
    """Prompts take 110 ms each; 8 sequences of 64 tokens decode in less."""
    found = pipeline(requests(200, 100, 64), stage(), stage(), Link(1, 1e9), 8, APART)
    assert found.requests_per_s == pytest.approx(1 / 0.143, rel=0.2)
    assert found.requests_per_s == pytest.approx(
        steady(stage(), stage(), Link(1, 1e9), 100, 64, 8, APART).disaggregated, rel=0.1
    )


def test_a_server_that_is_hardly_used_answers_at_once() -> None:
    found = pipeline(requests(5, 100, 4, every=10.0), stage(), stage(), Link(1, 1e9), 8, APART)
    assert found.first_token(0.95) == pytest.approx(0.11, rel=1e-3)
    assert found.seconds == pytest.approx(40 + 0.11 + 3 * 0.011, rel=1e-3)


def test_prompts_wait_where_nobody_takes_them() -> None:
    """One slot, and long answers: the prefill side computes `bound` prompts ahead, and no more."""
    slow = stage(fixed=1.0)
    found = pipeline(requests(6, 1, 10), stage(), slow, Link(1, 1e9), 1, APART, bound=2)
    assert found.seconds == pytest.approx(6 * 9 * 1.001, rel=0.01)
    assert found.first_token_s[0] < 0.1 < found.first_token_s[1]


def test_two_equal_devices_on_one_machine_do_not_pay_and_the_report_says_so() -> None:
    found = compare(requests(40, 100, 32), stage("x"), stage("y"), Link(46_080, 5), 4, Sharing(True), 2048)
    assert found.gain < 1
    assert not found.to_dict()["pays"]
    text = found.text()
    assert "it does not pay" in text
    assert "limited by the machine that both run on" in text
    assert "1,024 tokens (47.2 MB) take 9.4 ms" in text
    apart = compare(requests(40, 100, 32), stage("x"), stage("y"), Link(46_080, 5), 4, APART, 2048)
    assert 1 < apart.gain < 2
    assert "it pays" in apart.text()


def test_no_traffic_is_refused() -> None:
    with pytest.raises(InputError, match="no request"):
        alone([], stage(), 1)
