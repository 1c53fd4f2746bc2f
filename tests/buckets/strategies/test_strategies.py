"""The linear rule, ranges, and the registry of strategies."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets import strategies
from llmc.buckets.limits import Limits
from llmc.buckets.planner import bucket_file
from llmc.buckets.strategies import linear, traffic
from llmc.buckets.strategies.base import DIMENSIONS, MAX_VALUES, Range
from llmc.errors import InputError, UnknownNameError
from tests.buckets.generators import PROPERTY


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ((2, 32, 64), [2, 4, 8, 16, 32, 64]),
        ((128, 128, 512), [128, 256, 384, 512]),
        ((1, 32, 4), [1, 2, 4]),
        ((1, 128, 4), [1, 2, 4]),
        ((3, 32, 64), [3, 6, 12, 24, 32, 64]),
        ((0, 128, 256), [0, 128, 256]),
        ((0, 128, 0), [0]),
        ((0, 0, 0), [0]),
        ((7, 0, 7), [7]),
        ((1, 1, 4), [1, 2, 3, 4]),
        ((5, 5, 5), [5]),
        ((128, 128, 1000), [128, 256, 384, 512, 640, 768, 896]),
        ((100, 64, 256), [128, 192, 256]),
        ((100, 64, 120), []),
    ],
)
def test_linear_examples(bounds, expected):
    assert linear.values(*bounds) == expected


@PROPERTY
@given(st.integers(0, 300), st.integers(1, 300), st.integers(0, 600))
def test_linear_is_the_ramp_up_rule(low, step, extra):
    high = low + extra
    found = linear.values(low, step, high)
    start = low or step
    ramp_up = {start * 2**i for i in range(12) if start * 2**i < step}
    stable = {multiple for multiple in range(step, high + 1, step) if multiple >= start}
    zero = {0} if low == 0 else set()
    assert found == sorted(zero | {value for value in ramp_up if value <= high} | stable)


@PROPERTY
@given(st.integers(0, 300), st.integers(1, 300), st.integers(0, 600))
def test_linear_values_ascend_within_their_bounds(low, step, extra):
    found = linear.values(low, step, low + extra)
    assert found == sorted(set(found))
    assert all(low <= value <= low + extra for value in found)
    assert all(after - before <= step for before, after in pairwise(found))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((8, 1, 4), "--prompt-batch 8,1,4: min is above max; swap them or raise max to at least 8"),
        ((1, 0, 4), "--prompt-batch 1,0,4: step must be at least 1"),
        ((1, -2, 4), "--prompt-batch 1,-2,4: step must not be negative"),
        ((-1, 1, 4), "--prompt-batch -1,1,4: min must not be negative"),
        ((1, 2.0, 4), "step 2.0 is not an integer"),
        ((1, 1, 10**12), f"spans more than {MAX_VALUES} values; raise step to at least"),
    ],
)
def test_a_range_that_is_none_is_named(bounds, message):
    with pytest.raises(InputError, match=message):
        Range(*bounds, source="--prompt-batch")


@pytest.mark.parametrize("name", [name for name in strategies.names() if name != strategies.FILE])
@pytest.mark.parametrize("value", [0, 1, 7, 128])
def test_step_0_beside_min_and_max_that_are_equal_is_one_value_to_every_rule(name, value):
    rule, limits = strategies.create(name), Limits(1024, 8, 512)
    bounds = rule.complete("prompt_context", Range(value, 0, value), limits)
    assert rule.values("prompt_context", bounds) == [value]


def test_the_rule_alone_refuses_the_same_ranges():
    with pytest.raises(InputError, match="linear 2,1,1: min is above max"):
        linear.values(2, 1, 1)


def test_following_the_advice_for_too_many_values_works():
    high = 10**12
    Range(1, high // MAX_VALUES + 1, high)


def test_the_source_of_a_range_is_no_part_of_it():
    assert Range(1, 2, 3, "a") == Range(1, 2, 3, "b")


@pytest.mark.parametrize("name", [name for name in strategies.names() if name != strategies.FILE])
def test_every_registered_strategy_keeps_the_contract(name):
    strategy = strategies.create(name)
    for limits in (Limits(2), Limits(1000, 6, 700), Limits(4096, 100, max_prompt_len=5)):
        defaults = strategy.defaults(limits)
        assert set(defaults) == set(DIMENSIONS)
        for dimension, bounds in defaults.items():
            found = strategy.values(dimension, bounds)
            assert found == sorted(set(found))
            assert all(bounds.min <= value <= bounds.max for value in found)


def test_an_unknown_strategy_lists_the_known():
    with pytest.raises(UnknownNameError, match=r"unknown bucketing strategy 'cubic'; known: .*linear"):
        strategies.create("cubic")


def test_linear_defaults_are_the_guides():
    defaults = strategies.create("linear").defaults(Limits(4096, 100))
    assert defaults["prompt_batch"] == Range(1, 32, 64)
    assert defaults["prompt_query"] == Range(128, 128, 4096)
    assert defaults["prompt_context"] == Range(0, 128, 0)
    assert defaults["decode_batch"] == Range(1, 32, 100)
    assert defaults["decode_context"] == Range(128, 128, 4096)


def test_every_rule_can_be_had_alone():
    assert bucket_file.values("(1, [128, 256], 0)\n(4, 1, 512)") == [(1, 128, 0), (1, 256, 0), (4, 1, 512)]
    assert traffic.values([3, 3, 3, 9, 10], 2) == [3, 10]
    assert traffic.values([3, 3, 3, 9, 10], 2, 64) == [10, 64]
    assert traffic.values([5], 7) == [5]
    assert traffic.multiples(2, 4, 10) == [2, 4, 8, 10]


@PROPERTY
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 4))
def test_no_other_values_pad_lengths_less(lengths, graphs):
    found = traffic.values(lengths, graphs)
    assert found == sorted(set(found))
    assert len(found) <= graphs
    assert found[-1] == max(lengths)

    def padded(values):
        return sum(next(value for value in values if value >= length) for length in lengths)

    others = combinations(sorted(set(lengths)), min(graphs, len(set(lengths))) - 1)
    assert padded(found) == min(padded(sorted({*other, max(lengths)})) for other in others)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 2), "there are no lengths to choose values for"),
        (([0, 4], 2), "length 0 is not within 1 and 4"),
        (([9], 2, 8), "length 9 is not within 1 and 8"),
        (([9], 0), "the number of graphs 0 must be at least 1"),
    ],
)
def test_lengths_that_cannot_be_planned_for_are_named(arguments, message):
    with pytest.raises(InputError, match=message):
        traffic.values(*arguments)
