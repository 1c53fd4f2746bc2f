"""What is asked for: merged, in one order, and refused when it makes no sense."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.optimise.demand import Demand
from llmc.errors import InputError
from tests.buckets.generators import PROPERTY


def test_equal_steps_are_merged_and_sorted_and_those_of_weight_zero_left_out():
    demand = Demand([[2, 5], [1, 9], [2, 5], [3, 3]], [1, 2, 0.5, 0])
    assert demand.points.tolist() == [[1, 9], [2, 5]]
    assert demand.weights.tolist() == [2.0, 1.5]
    assert demand.dimensions == 2


@PROPERTY
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.floats(0, 1e6)), max_size=20), st.randoms())
def test_the_order_of_the_steps_changes_no_bit(steps, random):
    shuffled = list(steps)
    random.shuffle(shuffled)
    one, other = (
        Demand(np.array([step[:2] for step in each], np.int64).reshape(-1, 2), [step[2] for step in each])
        for each in (steps, shuffled)
    )
    assert one.points.tobytes() == other.points.tobytes()
    assert one.weights.tobytes() == other.weights.tobytes()


def test_a_demand_cannot_be_changed():
    demand = Demand([[1]], [1])
    with pytest.raises(ValueError, match="read-only"):
        demand.weights[0] = 2


@pytest.mark.parametrize(
    ("points", "weights", "message"),
    [
        ([1, 2], [1, 1], r"shape \(2,\) are not rows"),
        ([[1, 2, 3, 4]], [1], "1 to 3 numbers"),
        ([[1, 2], [3]], [1, 1], "not rows of the same length"),
        ([[1.5]], [1], "float64 are not integers"),
        ([[1], [-2]], [1, 1], r"point \(-2\) must be within 0 and"),
        ([[1, 2**31]], [1], r"point \(1, 2147483648\)"),
        ([[1]], [1, 2], "2 weights for 1 points"),
        ([[1], [7]], [1, -1], r"point \(7\) is -1.0"),
        ([[7]], [float("nan")], "is nan"),
        ([[7]], [float("inf")], "is inf"),
    ],
)
def test_what_is_no_demand_is_refused(points, weights, message):
    with pytest.raises(InputError, match=message):
        Demand(points, weights)
