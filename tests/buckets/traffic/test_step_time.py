"""The assumed device, by the numbers its docstring gives."""

from __future__ import annotations

import math

import pytest

from llmc.buckets.traffic.step_time import AssumedStepTime, StepTime
from llmc.errors import InputError


def test_a_decode_step_reads_the_weights_and_the_cache():
    times: StepTime = AssumedStepTime()
    assert times.decode(1, 0, 0) == pytest.approx(0.008)
    assert times.decode(64, 4000, 100_000) == pytest.approx(0.008 + 100_000 * 0.066e-6, rel=1e-2)


def test_prefill_computes_the_new_tokens_and_takes_at_least_a_decode_step():
    times = AssumedStepTime()
    assert times.prompt([1000, 500], [0, 300]) == pytest.approx(1200 * 0.08e-3)
    assert times.prompt([10], [9]) == times.decode(1, 0, 0)


def test_each_time_can_be_given():
    times = AssumedStepTime(weights_seconds=1, cached_token_seconds=2, new_token_seconds=3)
    assert times.decode(1, 5, 5) == 11
    assert times.prompt([5], [0]) == 15


@pytest.mark.parametrize("name", ["weights_seconds", "cached_token_seconds", "new_token_seconds"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_times_that_make_no_sense_are_refused(name, value):
    with pytest.raises(InputError, match=f"{name} {value} must be a time in seconds"):
        AssumedStepTime(**{name: value})


def test_a_step_cannot_be_free():
    with pytest.raises(InputError, match="weights_seconds must be above 0"):
        AssumedStepTime(weights_seconds=0)
