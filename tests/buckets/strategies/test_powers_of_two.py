"""The two power-of-two rules: NxD Inference's and tpu-inference's."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.limits import Limits
from llmc.buckets.strategies import powers_of_two
from llmc.buckets.strategies.base import DIMENSIONS, MAX_VALUES, Range
from llmc.buckets.strategies.powers_of_two import PowersOfTwo, PowersOfTwoTPU
from llmc.errors import InputError
from tests.buckets.generators import PROPERTY, small_limits, small_ranges

POWERS = [1 << exponent for exponent in range(40)]


def transcribed_values(low: int, high: int) -> list[int]:
    """NxD Inference's rule word for word."""
    if low == high:
        return [high]
    first = max(power for power in POWERS if power <= low)
    return [power for power in POWERS if first <= power < high] + [high]


def transcribed_tokens(low: int, high: int, gap: int) -> list[int]:
    """tpu-inference's rule word for word: doubling up to the gap, then gap after gap, the first max or more last."""
    doubled = [low * power for power in POWERS if power == 1 or gap == 0 or low * power <= gap]
    climbing = [doubled[-1] + gap * count for count in range(1, high + 1)] if gap else []
    found = []
    for value in [*doubled, *climbing]:
        found.append(value)
        if value >= high:
            break
    return found


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ((1, 8), [1, 2, 4, 8]),
        ((128, 1024), [128, 256, 512, 1024]),
        ((128, 1000), [128, 256, 512, 1000]),
        ((100, 200), [64, 128, 200]),
        ((128, 128), [128]),
        ((100, 100), [100]),
        ((3, 4), [2, 4]),
        ((512, 513), [512, 513]),
    ],
)
def test_values_examples(bounds, expected):
    assert powers_of_two.values(*bounds) == expected


@PROPERTY
@given(st.integers(1, 3000), st.integers(0, 100_000))
def test_values_are_the_powers_below_max_and_max(low, extra):
    found = powers_of_two.values(low, low + extra)
    assert found == transcribed_values(low, low + extra)
    assert found == sorted(set(found))
    assert all(after <= 2 * before for before, after in pairwise(found))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0,), [0]),
        ((2048,), [0, 512, 1024, 2048]),
        ((512,), [0, 512]),
        ((300,), [0, 300]),
        ((3000,), [0, 512, 1024, 2048, 3000]),
        ((1024, 128), [0, 128, 256, 512, 1024]),
    ],
)
def test_prefix_values_are_zero_or_at_least_the_shortest_prefix(arguments, expected):
    assert powers_of_two.prefix_values(*arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((16, 100), [16, 32, 64, 128]),
        ((16, 128, 0), [16, 32, 64, 128]),
        ((16, 200, 64), [16, 32, 64, 128, 192, 256]),
        ((16, 300, 100), [16, 32, 64, 164, 264, 364]),
        ((16, 40, 8), [16, 24, 32, 40]),
        ((16, 32, 64), [16, 32]),
        ((16, 16), [16]),
    ],
)
def test_token_values_examples(arguments, expected):
    assert powers_of_two.token_values(*arguments) == expected


@PROPERTY
@given(st.integers(1, 100), st.integers(0, 2000), st.integers(0, 300))
def test_token_values_double_up_to_the_gap_and_then_add_it(low, extra, gap):
    found = powers_of_two.token_values(low, low + extra, gap)
    assert found == transcribed_tokens(low, low + extra, gap)
    assert found == sorted(set(found))
    assert all(value < low + extra for value in found[:-1])
    assert found[-1] >= low + extra


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((8,), [8]),
        ((20,), [8, 16, 20]),
        ((64,), [8, 16, 32, 64]),
        ((5,), [5]),
        ((1,), [1]),
        ((20, 1), [1, 2, 4, 8, 16, 20]),
        ((200, 16, 64), [16, 32, 64, 128, 192, 200]),
    ],
)
def test_request_values_end_at_max(arguments, expected):
    assert powers_of_two.request_values(*arguments) == expected


@PROPERTY
@given(st.integers(1, 2000), st.integers(1, 100), st.integers(0, 300))
def test_request_values_are_token_values_cut_off_at_max(high, low, gap):
    found = powers_of_two.request_values(high, low, gap)
    assert found == sorted({min(value, high) for value in transcribed_tokens(min(low, high), high, gap)})


@PROPERTY
@given(st.integers(1, 2000), st.integers(1, 100), st.integers(0, 500))
def test_a_gap_at_or_above_max_is_no_gap(high, low, extra):
    assert powers_of_two.request_values(high, low, high + extra) == powers_of_two.request_values(high, low)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: powers_of_two.values(0, 8), "powers of two: min 0 must be at least 1"),
        (lambda: powers_of_two.values(8, 4), "powers of two: min 8 is above max 4; swap them or raise max"),
        (lambda: powers_of_two.values(1, 4.0), "powers of two: max 4.0 is not an integer"),
        (lambda: powers_of_two.values("1", 4), "powers of two: min '1' is not an integer"),
        (lambda: powers_of_two.prefix_values(-1), "powers of two: max -1 must be at least 0"),
        (lambda: powers_of_two.prefix_values("x"), "powers of two: max 'x' is not an integer"),
        (lambda: powers_of_two.prefix_values(8, 0), "powers of two: min 0 must be at least 1"),
        (lambda: powers_of_two.token_values(16, 8), "powers of two: min 16 is above max 8"),
        (lambda: powers_of_two.token_values(1, 8, -1), "powers of two: gap -1 must be at least 0"),
        (lambda: powers_of_two.token_values(1, 8, 0.5), "powers of two: gap 0.5 is not an integer"),
        (lambda: powers_of_two.token_values(1, MAX_VALUES * 4, 2), "raise it to at least 5"),
        (lambda: powers_of_two.request_values(0), "powers of two: max 0 must be at least 1"),
        (lambda: powers_of_two.request_values(None), "powers of two: max None is not an integer"),
    ],
)
def test_numbers_that_are_none_are_refused(call, message):
    with pytest.raises(InputError, match=re.escape(message)):
        call()


def test_following_the_advice_for_too_small_a_gap_works():
    assert len(powers_of_two.token_values(1, MAX_VALUES * 4, 5)) < MAX_VALUES


@pytest.mark.parametrize("strategy", [PowersOfTwo(), PowersOfTwoTPU()])
@PROPERTY
@given(small_limits(), small_ranges(0))
def test_both_strategies_stay_within_their_bounds_and_reach_the_top(strategy, limits, bounds):
    ranges = {**strategy.defaults(limits), "other": bounds}
    for dimension, one in ranges.items():
        assert strategy.complete(dimension, one, limits) is one
        found = strategy.values(dimension, one)
        assert found == sorted(set(found))
        assert all(one.min <= value <= one.max for value in found)
        assert found[-1] == one.max


def test_a_range_without_a_power_at_its_min_starts_at_the_next():
    assert PowersOfTwo().values("prompt_query", Range(100, 1, 300)) == [128, 256, 300]
    assert PowersOfTwo().values("prompt_query", Range(100, 1, 100)) == [100]


def test_a_tpu_range_doubles_from_its_min_up_to_the_step():
    assert PowersOfTwoTPU().values("prompt_query", Range(100, 150, 450)) == [100, 250, 400, 450]
    assert PowersOfTwoTPU().values("prompt_query", Range(100, 450, 450)) == [100, 200, 400, 450]


def test_contexts_that_start_at_zero():
    assert PowersOfTwo().values("prompt_context", Range(0, 1, 2000)) == [0, 512, 1024, 2000]
    assert PowersOfTwoTPU().values("prompt_context", Range(0, 2000, 2000)) == [0, 128, 256, 512, 1024, 2000]
    assert PowersOfTwoTPU().values("decode_context", Range(0, 1, 0)) == [0]


def test_nxd_defaults():
    limits = Limits(4096, 100)
    rule = PowersOfTwo()
    assert {dimension: rule.values(dimension, rule.defaults(limits)[dimension]) for dimension in DIMENSIONS} == {
        "prompt_batch": [1, 2, 4, 8, 16, 32, 64],
        "prompt_query": [128, 256, 512, 1024, 2048, 4096],
        "prompt_context": [0],
        "decode_batch": [1, 2, 4, 8, 16, 32, 64, 100],
        "decode_context": [128, 256, 512, 1024, 2048, 4096],
    }


def test_nxd_plans_prefix_buckets_where_prompts_exceed_the_largest_query():
    limits = Limits(16384, 4, 2048)
    rule = PowersOfTwo()
    defaults = rule.defaults(limits)
    assert rule.values("prompt_query", defaults["prompt_query"]) == [512, 1024, 2048]
    assert rule.values("prompt_context", defaults["prompt_context"]) == [0, 512, 1024, 2048, 4096, 8192, 14336]


def test_tpu_defaults():
    limits = Limits(4096, 100, 1000)
    rule = PowersOfTwoTPU()
    assert {dimension: rule.values(dimension, rule.defaults(limits)[dimension]) for dimension in DIMENSIONS} == {
        "prompt_batch": [1, 2, 4, 8, 16, 32, 64],
        "prompt_query": [16, 32, 64, 128, 256, 512, 1000],
        "prompt_context": [0, 128, 256, 512, 1024, 2048, 3968],
        "decode_batch": [8, 16, 32, 64, 100],
        "decode_context": [128, 256, 512, 1024, 2048, 4096],
    }
