"""Families of one number: the next graph above is taken, and the best list of any length is found exactly."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from llmc.buckets.optimise.line import Line
from llmc.errors import InputError
from llmc.integrations.base import Demand, Miss, Pick, Shape


class Exact:
    """Takes a number of the list alone; every other step runs in its own shape."""

    def __init__(self, shapes: Sequence[Shape], miss: Miss) -> None:
        self._shapes = frozenset(shapes)
        self._miss: Miss = miss

    def find(self, shape: Shape) -> Pick:
        """The graph that a step of `shape` takes."""
        return Pick(shape, None if shape in self._shapes else self._miss)


def shapes(values: Iterable[int]) -> tuple[Shape, ...]:
    """`values` as shapes of one number, ascending and distinct."""
    return tuple((value,) for value in sorted(set(values)))


def values(shapes: Iterable[Shape]) -> list[int]:
    """The numbers of shapes that have one."""
    return [value for (value,) in shapes]


def whole_numbers(value: object, spelling: str, least: int = 1) -> list[int]:
    """`value`, a list of whole numbers above 0, in the order given.

    Raises InputError, naming `spelling`, for anything else, and for fewer than `least` of them.
    """
    if not isinstance(value, list) or len(value) < least or not all(type(item) is int and item > 0 for item in value):
        raise InputError(f"{spelling} must be a list of whole numbers above 0, as in [1, 2, 4, 8]")
    return value


def numbers(value: object, spelling: str) -> tuple[Shape, ...]:
    """`value` as `whole_numbers` reads it, as shapes."""
    return shapes(whole_numbers(value, spelling))


def written_numbers(text: str, spelling: str) -> tuple[Shape, ...]:
    """Whole numbers above 0 between blanks or commas, as flags, variables and logs have them. Raises InputError."""
    words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    if not words or not all(word.isdecimal() and len(word) < 10 and int(word) for word in words):
        raise InputError(f"{spelling} must be whole numbers above 0, as in 1 2 4 8")
    return shapes(map(int, words))


def logged(
    lines: Iterable[str], patterns: Mapping[str, re.Pattern[str]], spelled: Mapping[str, str]
) -> dict[str, tuple[Shape, ...]]:
    """By family the last list that one of `lines` has in group 1 of the family's pattern; `spelled` as in an error.

    Raises InputError as `written_numbers`.
    """
    found = {}
    for text in lines:
        for family, pattern in patterns.items():
            if match := pattern.search(text):
                found[family] = written_numbers(match[1], spelled[family])
    return found


def doubling(least: int, most: int) -> list[int]:
    """least, 2 · least, 4 · least … below `most`, then `most`."""
    found = []
    while least < most:
        found.append(least)
        least *= 2
    return [*found, most]


def choose(
    demands: Mapping[Shape, Demand],
    candidates: Iterable[int],
    required: Iterable[int],
    most: int,
    work: Callable[[int], float] = float,
) -> tuple[Shape, ...]:
    """At most `most` of `candidates` that pad the steps of `demands` least, all `required` ones among them.

    A step runs in the least chosen number at or above its own; steps above the largest candidate run without a graph
    and count nowhere. `work` of a number is what one run costs, and rises with it. Exact: dynamic programming over the
    candidates (optimise/line.py). Raises InputError where `required` are more than `most`.
    """
    needed = set(required)
    if len(needed) > most:
        raise InputError(f"at most {most} graphs, but {len(needed)} are needed in any case: {_few(sorted(needed))}")
    indices = sorted({*candidates, *needed})
    weights = np.zeros(len(indices))
    for (value,), demand in demands.items():
        index = bisect_left(indices, value)
        if index < len(indices):
            weights[index] += demand.steps
    costs = np.array([work(index) for index in indices], np.float64)
    last = int(np.flatnonzero([index in needed for index in indices] | (weights > 0))[-1])
    forced = np.array([index in needed for index in indices[: last + 1]])
    line = Line(costs[: last + 1], weights[: last + 1], forced)
    return tuple((indices[index],) for index in line.solve([most])[0].tolist())


def most_frequent(demands: Mapping[Shape, Demand], candidates: Iterable[int], most: int) -> tuple[Shape, ...]:
    """The `most` candidates that the most steps have, for a look-up that takes equal numbers alone (`Exact`)."""
    admitted = set(candidates)
    ranked = sorted((-demand.steps, shape) for shape, demand in demands.items() if shape[0] in admitted)
    return tuple(sorted(shape for _, shape in ranked[:most]))


def _few(values: Sequence[int]) -> str:
    return ", ".join(map(str, values[:8])) + (", …" if len(values) > 8 else "")
