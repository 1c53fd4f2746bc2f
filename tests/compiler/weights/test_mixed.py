"""Which matrices stay in 8 bits: the dearest for their size, until the predicted divergence is within the bound."""

from __future__ import annotations

from llmc.compiler.weights.mixed import GroupCost, widened

COSTS = [
    GroupCost(("q", "k", "v"), 30, 0.03),
    GroupCost(("o",), 10, 0.02),
    GroupCost(("gate", "up"), 80, 0.04),
    GroupCost(("down",), 40, 0.01),
]
NONE: frozenset[str] = frozenset()


def test_the_dearest_for_its_size_is_first_and_what_shares_a_format_is_together() -> None:
    assert widened(COSTS, NONE, 0.1, 0.09) == {"o"}
    assert widened(COSTS, NONE, 0.1, 0.06) == {"o", "q", "k", "v"}
    assert widened(COSTS, NONE, 0.1, 0.02) == {"o", "q", "k", "v", "gate", "up"}


def test_costs_are_taken_times_what_their_sum_was_wrong_by() -> None:
    assert widened(COSTS, NONE, 0.2, 0.16) == {"o"}
    assert widened(COSTS, NONE, 0.05, 0.03) == {"o", "q", "k", "v"}
    again = widened(COSTS, frozenset({"o"}), 0.12, 0.09)
    assert again == {"o", "q", "k", "v"}, "what is left costs 0.08, and was measured at 0.12"


def test_what_stays_in_4_bits_is_counted_and_left_there() -> None:
    assert widened(COSTS, NONE, 0.2, 0.16, fixed=0.1) == {"o", "q", "k", "v"}
    assert widened(COSTS, NONE, 0.2, 0.09, fixed=0.1) == {name for cost in COSTS for name in cost.names}


def test_a_bound_that_is_not_predicted_to_be_kept_widens_all() -> None:
    every = widened(COSTS, NONE, 0.1, 0.0)
    assert every == {name for cost in COSTS for name in cost.names}
    assert widened(COSTS, every, 0.1, 0.0) == every


def test_one_at_least_is_widened() -> None:
    free = [GroupCost(("a",), 10, 0.0), GroupCost(("b",), 10, 0.0)]
    assert len(widened(free, NONE, 0.1, 0.05)) == 1
