"""The assumed device, by the numbers its docstring gives."""

from __future__ import annotations

import pytest

from llmc.buckets.traffic.step_time import AssumedStepTime, StepTime


def test_a_decode_step_reads_the_weights_and_the_cache():
    times: StepTime = AssumedStepTime()
    assert times.decode(1, 0, 0) == pytest.approx(0.008)
    assert times.decode(64, 4000, 100_000) == pytest.approx(0.008 + 100_000 * 0.066e-6, rel=1e-2)


def test_prefill_computes_the_new_tokens_and_takes_at_least_a_decode_step():
    times = AssumedStepTime()
    assert times.prompt([1000, 500], [0, 300]) == pytest.approx(1200 * 0.08e-3)
    assert times.prompt([10], [9]) == times.decode(1, 0, 0)
