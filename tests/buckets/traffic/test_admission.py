"""Only requests that the limits allow are passed on, and none goes missing uncounted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.limits import Limits
from llmc.buckets.traffic.admission import Admission
from llmc.buckets.traffic.events import TrafficRequest
from llmc.errors import InputError
from tests.buckets.generators import PROPERTY, small_limits

REQUESTS = st.lists(
    st.builds(
        lambda prompt, output, cached: TrafficRequest(0.0, prompt, output, min(cached, prompt - 1)),
        st.integers(1, 100),
        st.integers(1, 100),
        st.integers(0, 99),
    ),
    max_size=20,
)
MIXED = [TrafficRequest(0, 40, 24), TrafficRequest(1, 41, 23), TrafficRequest(2, 40, 25), TrafficRequest(3, 70, 9, 60)]


def test_what_does_not_fit_is_left_out_and_counted():
    admission = Admission(Limits(64, max_prompt_len=40))
    assert list(admission(MIXED)) == MIXED[:1]
    assert (admission.admitted, admission.above_prompt, admission.above_total, admission.clipped) == (1, 2, 1, 0)
    assert admission.left_out == 3
    assert admission.note() == (
        "1 of 4 requests admitted, left out: 2 with a prompt above 40 tokens (max_prompt_len), "
        "1 with prompt and output above 64 tokens (max_model_len)"
    )


def test_what_does_not_fit_is_clipped_when_requested():
    admission = Admission(Limits(64, max_prompt_len=40), clip=True)
    assert list(admission(MIXED)) == [
        TrafficRequest(0, 40, 24),
        TrafficRequest(1, 40, 23),
        TrafficRequest(2, 40, 24),
        TrafficRequest(3, 40, 9, 39),
    ]
    assert (admission.admitted, admission.above_prompt, admission.above_total, admission.clipped) == (4, 2, 1, 3)
    assert admission.left_out == 0
    assert admission.note().startswith("4 of 4 requests admitted, clipped: 2 with a prompt above 40 tokens")


def test_the_prompt_limit_is_named_after_the_model_when_no_other_is_set():
    admission = Admission(Limits(64))
    assert list(admission([TrafficRequest(0, 64, 1), TrafficRequest(0, 63, 1)])) == [TrafficRequest(0, 63, 1)]
    assert "1 with a prompt above 63 tokens (max_model_len - 1)" in admission.note()


def test_counts_start_again_with_each_call():
    admission = Admission(Limits(64))
    for _ in range(2):
        list(admission(MIXED))
        assert admission.admitted + admission.left_out == 4
    list(admission(MIXED[:1]))
    assert admission.note() == "1 of 1 requests admitted"


def test_a_trace_of_which_nothing_fits_is_an_error():
    with pytest.raises(InputError, match=r"none of the 4 requests of the trace fits: 0 of 4 .* raise max_model_len"):
        list(Admission(Limits(16))(MIXED))
    assert list(Admission(Limits(16))([])) == []


@PROPERTY
@given(REQUESTS, small_limits())
def test_every_request_is_passed_on_or_counted(requests, limits):
    for clip in (False, True):
        admission = Admission(limits, clip=clip)
        try:
            passed = list(admission(requests))
        except InputError:
            passed = []
        for request in passed:
            assert 1 <= request.prompt <= limits.longest_prompt
            assert request.output >= 1
            assert request.prompt + request.output <= limits.max_model_len
            assert 0 <= request.cached < request.prompt
        assert len(passed) == admission.admitted
        assert len(passed) + admission.left_out == len(requests)
        if clip:
            assert admission.left_out == 0
        else:
            assert passed == [
                request
                for request in requests
                if request.prompt <= limits.longest_prompt and request.prompt + request.output <= limits.max_model_len
            ]
