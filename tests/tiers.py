"""The tiers of the tests: what the default run leaves to the full suite.

A test marked `full` runs in `make test-all` only. A parametrized test with several axes runs in the default tier with
each value of each axis; other combinations are marked `full` here. Property tests take `examples(n)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import pytest
from hypothesis import settings

DEFAULT_EXAMPLES = 25
"""Examples that a property test draws at most in the default tier."""
DEFAULT, FULL = "llmc-default", "llmc-full"
"""Names of the Hypothesis profiles."""

full = pytest.mark.full

Axes = Mapping[str, tuple[int, ...]]
"""The axes of a case, by their parameters' names: which value each has."""


def examples(count: int, parent: settings | None = None, **others: Any) -> settings:
    """Hypothesis settings: `count` examples in the full suite, at most `DEFAULT_EXAMPLES` in the default tier."""
    capped = settings.get_current_profile_name() != FULL
    return settings(parent, max_examples=min(count, DEFAULT_EXAMPLES) if capped else count, **others)


def all_but(kept: Iterable[object], values: Iterable[Any]) -> list[Any]:
    """Parameters for `parametrize`: `values`, of which those not in `kept` run in the full suite only.

    Raises ValueError if one of `kept` is not among the values.
    """
    kept, values = list(kept), list(values)
    if unknown := [value for value in kept if value not in values]:
        raise ValueError(f"not among the values: {unknown}")
    return [value if value in kept else pytest.param(value, marks=full) for value in values]


def combinations_left(cases: Sequence[Axes]) -> set[int]:
    """Positions of the cases that add no value: the others have each value of each axis, in as few as greed finds."""
    missing = {pair for case in cases for pair in case.items()}
    left = set(range(len(cases)))
    while missing:
        best = max(sorted(left), key=lambda n: len(missing & cases[n].items()))
        missing -= cases[best].items()
        left.remove(best)
    return left


def mark_combinations(items: Sequence[pytest.Item]) -> None:
    """Marks as `full` the combinations that the default tier leaves out (see `combinations_left`)."""
    for _, group in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        cases = [(item, axes) for item in group if len(axes := _axes(item)) > 1 and "full" not in item.keywords]
        for position in combinations_left([axes for _, axes in cases]):
            cases[position][0].add_marker(full)


def _axes(item: pytest.Item) -> Axes:
    """The axes of a parametrized test. A value is known by its identity, as all cases of an axis share its objects."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return {}
    values = {name: id(value) for name, value in callspec.params.items()}
    axes: dict[str, tuple[int, ...]] = {}
    for mark in item.iter_markers("parametrize"):
        given = mark.kwargs.get("argnames", mark.args[0] if mark.args else ())
        names = [name.strip() for name in given.split(",")] if isinstance(given, str) else list(given)
        axes[",".join(names)] = tuple(values.pop(name) for name in names)
    return axes | {name: (value,) for name, value in values.items()}
