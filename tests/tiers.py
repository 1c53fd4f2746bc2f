"""The tiers of the tests: what the default run leaves to the full suite.

A test marked `full` runs in `make test-all` only. Of a parametrized test marked `default_cases(ID, …)` the default tier
runs the cases with these IDs. Without that mark, and with several axes, it runs each value of each axis, and leaves
further combinations to the full suite. Property tests take `examples(n)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import pytest
from hypothesis import settings

DEFAULT_EXAMPLES = 25
"""Examples that a property test draws at most in the default tier."""
DEFAULT, FULL = "llmc-default", "llmc-full"
"""Names of the Hypothesis profiles."""

full = pytest.mark.full
default_cases = pytest.mark.default_cases

Axes = Mapping[str, tuple[int, ...]]
"""The axes of a case, by their parameters' names: which value each has."""


def examples(count: int, parent: settings | None = None, **others: Any) -> settings:
    """Hypothesis settings: `count` examples in the full suite, at most `DEFAULT_EXAMPLES` in the default tier."""
    capped = settings.get_current_profile_name() != FULL
    return settings(parent, max_examples=min(count, DEFAULT_EXAMPLES) if capped else count, **others)


def combinations_left(cases: Sequence[Axes]) -> set[int]:
    """Positions of the cases that add no value: the others have each value of each axis, in as few as greed finds."""
    missing = {pair for case in cases for pair in case.items()}
    left = set(range(len(cases)))
    while missing:
        best = max(sorted(left), key=lambda n: len(missing & cases[n].items()))
        missing -= cases[best].items()
        left.remove(best)
    return left


def mark_full(items: Sequence[pytest.Item]) -> None:
    """Marks as `full` the cases of parametrized tests that the default tier leaves out.

    Those are the cases that a `default_cases` marker does not name; without one, the combinations that add no value.
    Raises pytest.UsageError for a marker that names no case of its test.
    """
    for test, group in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        cases = [(item, item.callspec) for item in group if hasattr(item, "callspec")]
        if marker := next((item.get_closest_marker("default_cases") for item, _ in cases), None):
            if not (kept := set(marker.args) & {callspec.id for _, callspec in cases}) and len(cases) > 1:
                raise pytest.UsageError(f"{test}: default_cases names none of {[callspec.id for _, callspec in cases]}")
            left = [item for item, callspec in cases if callspec.id not in kept]
        else:
            several = [
                (item, axes) for item, _ in cases if len(axes := _axes(item)) > 1 and "full" not in item.keywords
            ]
            left = [several[position][0] for position in combinations_left([axes for _, axes in several])]
        for item in left:
            item.add_marker(full)


def _axes(item: pytest.Item) -> Axes:
    """The axes of a parametrized test. A value is known by its identity, as all cases of an axis share its objects."""
    values = {name: id(value) for name, value in item.callspec.params.items()}  # type: ignore[attr-defined]
    axes: dict[str, tuple[int, ...]] = {}
    for mark in item.iter_markers("parametrize"):
        given = mark.kwargs.get("argnames", mark.args[0] if mark.args else ())
        names = [name.strip() for name in given.split(",")] if isinstance(given, str) else list(given)
        axes[",".join(names)] = tuple(values.pop(name) for name in names)
    return axes | {name: (value,) for name, value in values.items()}
