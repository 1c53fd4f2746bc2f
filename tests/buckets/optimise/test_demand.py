"""What is asked for: merged, and in one order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.optimise.demand import Demand
from tests.buckets.generators import PROPERTY


def test_equal_steps_are_merged_and_sorted_and_those_of_weight_zero_left_out():
    demand = Demand([[2, 5], [1, 9], [2, 5], [3, 3]], [1, 2, 0.5, 0])
    assert demand.points.tolist() == [[1, 9], [2, 5]]
    assert demand.weights.tolist() == [2.0, 1.5]


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
