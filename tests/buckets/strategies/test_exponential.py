"""The exponential rule: exact geometric steps, its defaults, and what it refuses."""

from __future__ import annotations

from math import gcd

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmc.buckets.limits import Limits
from llmc.buckets.strategies import exponential
from llmc.buckets.strategies.base import DIMENSIONS, MAX_VALUES, Range
from llmc.buckets.strategies.exponential import Exponential, default_limit
from llmc.errors import InputError
from tests.buckets.generators import PROPERTY, small_limits

numbers = st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(0, 300), st.integers(1, 12))


def transcribed(low: int, step: int, high: int, limit: int) -> list[int]:
    """The rule word for word, with a search over the multiples of step instead of a power."""
    if limit <= 1:
        return [high]
    start = step if low in (0, 1) else low
    found = []
    for index in range(limit):
        value = 0
        while value ** (limit - 1) < high**index * start ** (limit - 1 - index):
            value += step
        found.append(value)
    if low in (0, 1):
        found.append(low)
    found = sorted(set(found))
    if found[-1] > high:
        found[-1] = high
    return sorted(set(found))


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ((1, 1, 32, 6), [1, 2, 4, 8, 16, 32]),
        ((1, 2, 64, 7), [1, 2, 4, 8, 12, 22, 36, 64]),
        ((128, 128, 1024, 4), [128, 256, 512, 1024]),
        ((128, 128, 4096, 12), [128, 256, 384, 512, 640, 896, 1280, 1664, 2304, 3072, 4096]),
        ((0, 128, 8192, 7), [0, 128, 256, 512, 1024, 2048, 4096, 8192]),
        ((0, 128, 128, 2), [0, 128]),
        ((100, 64, 1000, 3), [128, 320, 1000]),
        ((3, 8, 5, 3), [5]),
        ((7, 1, 7, 5), [7]),
        ((3, 1, 81, 4), [3, 9, 27, 81]),
    ],
)
def test_examples(bounds, expected):
    assert exponential.values(*bounds) == expected


@pytest.mark.parametrize("bounds", [(0, 8, 64, 1), (1, 8, 64, 1), (16, 8, 64, 1), (5, 8, 5, 1)])
def test_a_limit_of_one_gives_the_top_alone(bounds):
    assert exponential.values(*bounds) == [bounds[2]]


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [((1, 2, 1, 1), [1]), ((1, 2, 1, 4), [1]), ((0, 8, 5, 3), [0, 5]), ((1, 8, 5, 3), [1, 5]), ((0, 8, 0, 3), [0])],
)
def test_a_step_above_max_lifts_nothing_above_max(bounds, expected):
    assert exponential.values(*bounds) == expected


@pytest.mark.parametrize(("base", "count"), [(2, 32), (3, 20), (5, 14), (7, 12), (9, 10)])
def test_float_rounding_never_lifts_a_power(base, count):
    step = base ** (count - 1) // MAX_VALUES + 1
    found = exponential.values(base, 1, base**5, 5)
    assert found == [base**power for power in range(1, 6)]
    tall = exponential.values(base, step, base ** (count - 1), count - 1)
    assert tall == sorted({min(-(-(base**power) // step) * step, base ** (count - 1)) for power in range(1, count)})


@PROPERTY
@given(numbers)
@example((1, 1, 32, 6))
@example((0, 40, 0, 12))
def test_values_are_the_rule_word_for_word(bounds):
    low, step, extra, limit = bounds
    assert exponential.values(low, step, low + extra, limit) == transcribed(low, step, low + extra, limit)


@PROPERTY
@given(numbers)
def test_values_ascend_within_their_bounds_and_reach_the_top(bounds):
    low, step, extra, limit = bounds
    found = exponential.values(low, step, low + extra, limit)
    assert found == sorted(set(found))
    assert found[0] >= low
    assert found[-1] == low + extra
    assert len(found) <= limit + 1
    assert all(value % step == 0 for value in found[:-1] if value > 1)


@PROPERTY
@given(st.integers(2, 1000), st.integers(2, 9), st.integers(2, 6))
def test_a_whole_ratio_gives_its_powers(start, ratio, count):
    top = start * ratio ** (count - 1)
    step = top // MAX_VALUES + 1
    expected = {min(-(-start * ratio**index // step) * step, top) for index in range(count)}
    assert exponential.values(start, step, top, count) == sorted(expected)


@PROPERTY
@given(st.integers(2, 10**30), st.integers(1, 10**6), st.integers(2, 40))
def test_numbers_far_beyond_floats_stay_exact(start, factor, limit):
    step, top = start, start * min(factor, MAX_VALUES)
    found = exponential.values(start, step, top, limit)
    assert [value // start for value in found] == exponential.values(0, 1, top // start, limit)[1:]


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ((1, 1, 1000), list(range(1, 1001))),
        ((65536, 1, 65536), [65536]),
        ((65535, 1, 65536), [65535, 65536]),
        ((2**50, 2**35, 2**50 + 1), [2**50, 2**50 + 1]),
        ((2**50 - 1, 2**35, 2**50 + 1), [2**50, 2**50 + 1]),
        ((2**50 - 3, 2**35, 2**50 - 1), [2**50 - 1]),
        ((10**300, 10**296, 10**300 + 1), [10**300, 10**300 + 1]),
        ((10**300 - 1, 10**296, 10**300 + 1), [10**300, 10**300 + 1]),
    ],
)
@pytest.mark.parametrize("limit", [MAX_VALUES - 1, MAX_VALUES])
def test_huge_limits_stay_exact_and_cheap(bounds, expected, limit):
    assert exponential.values(*bounds, limit) == expected


@PROPERTY
@given(st.integers(2, 400), st.integers(2, 400), st.integers(1, 40), st.integers(1, 40), st.integers(1, 400))
def test_the_comparison_is_exact_with_and_without_logarithms(start, end, power, more, value):
    power, root = power // gcd(power, power + more), (power + more) // gcd(power, power + more)
    expected = value**root >= end**power * start ** (root - power)
    assert exponential._reaches(value, start, end, power, root) == expected


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((8, 1, 4, 3), "exponential 8,1,4: min is above max"),
        ((1, 0, 4, 3), "exponential 1,0,4: step must be at least 1"),
        ((1, 1, 4, 0), f"limit 0 must be 1 to {MAX_VALUES}"),
        ((1, 1, 4, -1), "limit must not be negative"),
        ((1, 1, 4, MAX_VALUES + 1), f"limit {MAX_VALUES + 1} must be 1 to"),
        ((1, 1, 4, 2.0), "limit 2.0 is not an integer"),
    ],
)
def test_numbers_that_are_no_range_are_refused(bounds, message):
    with pytest.raises(InputError, match=message):
        exponential.values(*bounds)


def test_the_strategy_needs_a_limit():
    with pytest.raises(InputError, match="--prompt-batch 1,2,8: the exponential rule needs a limit"):
        Exponential().values("prompt_batch", Range(1, 2, 8, "--prompt-batch"))


def test_defaults_are_the_guides_in_tokens_of_one_sequence():
    defaults = Exponential().defaults(Limits(4096, 100, 8192))
    assert defaults["prompt_batch"] == Range(1, 2, 64, limit=7)
    assert defaults["prompt_query"] == Range(128, 128, 4096, limit=12)
    assert defaults["prompt_context"] == Range(0, 128, 0, limit=1)
    assert defaults["decode_batch"] == Range(1, 2, 100, limit=8)
    assert defaults["decode_context"] == Range(128, 128, 4096, limit=6)


@pytest.mark.parametrize(
    ("limits", "most", "limit"),
    [
        (Limits(4096, 8, 4096), 0, 1),
        (Limits(4096, 8, 4095), 0, 1),
        (Limits(4096, 8, 2048), 31 * 128, 6),
        (Limits(8192, 8, 2048), 48 * 128, 7),
        (Limits(256, 8, 128), 128, 2),
        (Limits(200, 8, 100, 128), 128, 2),
        (Limits(8192, 8, 2048, max_prompt_len=2049), 128, 2),
        (Limits(8192, 8, 2048, max_prompt_len=2048), 0, 1),
    ],
)
def test_prompt_contexts_are_planned_only_for_prompts_above_the_largest_query(limits, most, limit):
    assert Exponential().defaults(limits)["prompt_context"] == Range(0, 128, most, limit=limit)


def test_one_sequence_and_short_models_have_defaults_too():
    defaults = Exponential().defaults(Limits(2, 1))
    found = {dimension: Exponential().values(dimension, defaults[dimension]) for dimension in DIMENSIONS}
    assert found == {
        "prompt_batch": [1],
        "prompt_query": [2],
        "prompt_context": [0],
        "decode_batch": [1],
        "decode_context": [2],
    }


@pytest.mark.parametrize(
    ("dimension", "most", "limit"),
    [
        ("prompt_batch", 1, 1),
        ("decode_batch", 33, 7),
        ("prompt_query", 1, 1),
        ("prompt_query", 1025, 11),
        ("prompt_context", 0, 1),
        ("prompt_context", 100, 2),
        ("prompt_context", 129, 2),
        ("prompt_context", 1024, 4),
        ("decode_context", 128, 1),
        ("decode_context", 1025, 5),
    ],
)
def test_the_default_limit_follows_the_top(dimension, most, limit):
    assert default_limit(dimension, most, 128) == limit
    bounds = Range(0, 1, most, "--flag")
    completed = Exponential().complete(dimension, bounds, Limits(4096))
    assert completed == Range(0, 1, most, limit=limit)
    assert completed.source == "--flag"


def test_a_limit_that_is_given_stays():
    bounds = Range(1, 2, 64, limit=3)
    assert Exponential().complete("prompt_batch", bounds, Limits(4096)) is bounds


@PROPERTY
@given(small_limits())
def test_defaults_reach_their_tops_under_any_limits(limits):
    for dimension, bounds in Exponential().defaults(limits).items():
        found = Exponential().values(dimension, bounds)
        assert found == sorted(set(found))
        assert bounds.min <= found[0]
        assert found[-1] == bounds.max


def test_a_default_that_cannot_be_planned_says_which_it_is():
    with pytest.raises(InputError, match="the default decode context 1,1,1000000: spans more than"):
        Exponential().defaults(Limits(10**6, block_size=1, max_prompt_len=5))
