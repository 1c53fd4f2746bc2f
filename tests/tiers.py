"""The tiers of the tests: what the default run leaves to the full suite.

A test marked `full` runs in `make test-all` only. Of a parametrized test marked `default_cases(ID, …)` the default tier
runs the cases with these IDs, and of one marked `default_cases(N)` N cases at even distances. Without that mark, and
with several axes, it runs each value of each axis, and leaves further combinations to the full suite. Property tests
take `examples(n)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings

DEFAULT_EXAMPLES = 25
"""Examples that a property test draws at most in the default tier."""
DEFAULT, FULL = "llmc-default", "llmc-full"
"""Names of the Hypothesis profiles."""

full = pytest.mark.full
default_cases = pytest.mark.default_cases

Case = TypeVar("Case", bound="tuple[Any, ...]")
Axes = Mapping[str, tuple[int, ...]]
"""The axes of a case, by their parameters' names: which value each has."""


def examples(count: int, parent: settings | None = None, **others: Any) -> settings:
    """Hypothesis settings: `count` examples in the full suite, at most `DEFAULT_EXAMPLES` in the default tier."""
    capped = settings.get_current_profile_name() != FULL
    return settings(parent, max_examples=min(count, DEFAULT_EXAMPLES) if capped else count, **others)


def require_mark(items: Sequence[pytest.Item], folder: Path, mark: str) -> None:
    """Raise UsageError for a test in the folder without the mark, which would run outside its environment."""
    for item in items:
        if folder in item.path.parents and mark not in item.keywords:
            raise pytest.UsageError(f"{item.nodeid} needs the mark {mark}")


def combinations_left(cases: Sequence[Axes]) -> set[int]:
    """Positions of the cases that add no value: the others have each value of each axis, in as few as greed finds."""
    return _spare([set(case.items()) for case in cases])


def pairwise(cases: Sequence[Case]) -> list[Case]:
    """Tuples of parameters that have each pair of values that any of `cases` has, in as few as greed finds."""
    spare = _spare([set(combinations(enumerate(case), 2)) for case in cases])
    return [case for position, case in enumerate(cases) if position not in spare]


def _spare(parts: Sequence[set[Any]]) -> set[int]:
    """Positions of the sets that greed leaves over when it has taken sets until they have all elements."""
    missing = set().union(*parts)
    left = set(range(len(parts)))
    while missing:
        best = max(sorted(left), key=lambda n: len(missing & parts[n]))
        missing -= parts[best]
        left.remove(best)
    return left


def mark_full(items: Sequence[pytest.Item]) -> None:
    """Marks as `full` the cases of parametrized tests that the default tier leaves out.

    Those are the cases that a `default_cases` marker leaves out; without one, the combinations that add no value.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test, group in tests.items():
        cases = sorted(group, key=_position)  # items may come in random order
        if marker := next((item.get_closest_marker("default_cases") for item in cases), None):
            kept = _named(test, [item.callspec.id for item in cases], marker.args)  # type: ignore[attr-defined]
            left = set(range(len(cases))) - kept
        else:
            cases = [item for item in cases if not item.get_closest_marker("full") and len(_axes(item)) > 1]
            left = combinations_left([_axes(item) for item in cases])
        for position in left:
            cases[position].add_marker(full)


def _named(test: str, ids: Sequence[str], names: Sequence[int | str]) -> set[int]:
    """Positions of the cases that a `default_cases` marker names; raises pytest.UsageError if it names none."""
    if isinstance(names[0], int):
        return {position * len(ids) // names[0] for position in range(names[0])}
    kept = {position for position, name in enumerate(ids) if name in names}
    if not kept and len(ids) > 1:
        raise pytest.UsageError(f"{test}: default_cases names none of {list(ids)}")
    return kept


def _position(item: pytest.Item) -> tuple[int, ...]:
    """Where a case stands among those of its test, as they are written."""
    return tuple(item.callspec.indices.values())  # type: ignore[attr-defined]


def _axes(item: pytest.Item) -> Axes:
    """The axes of a parametrized test. A value is known by its identity, as all cases of an axis share its objects."""
    values = {name: id(value) for name, value in item.callspec.params.items()}  # type: ignore[attr-defined]
    axes: dict[str, tuple[int, ...]] = {}
    for mark in item.iter_markers("parametrize"):
        given = mark.kwargs.get("argnames", mark.args[0] if mark.args else ())
        names = [name.strip() for name in given.split(",")] if isinstance(given, str) else list(given)
        axes[",".join(names)] = tuple(values.pop(name) for name in names)
    return axes | {name: (value,) for name, value in values.items()}
