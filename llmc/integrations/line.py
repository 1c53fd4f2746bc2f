"""Families with one axis: steps take the next graph above, and the best list of any length is found exactly."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from llmc.buckets.optimise.line import Line
from llmc.buckets.render.text import counted
from llmc.errors import InputError
from llmc.integrations.base import GraphDemand, Miss, Pick, Shape


class Exact:
    """Selects only numbers in the list; every other step runs in its own shape."""

    def __init__(self, shapes: Sequence[Shape], miss: Miss) -> None:
        self._shapes = frozenset(shapes)
        self._miss: Miss = miss

    def find(self, shape: Shape) -> Pick:
        """Return the graph for a step of `shape`."""
        return Pick(shape, None if shape in self._shapes else self._miss)


def shapes(values: Iterable[int]) -> tuple[Shape, ...]:
    """Return `values` as one-number shapes, ascending and distinct."""
    return tuple((value,) for value in sorted(set(values)))


def values(shapes: Iterable[Shape]) -> list[int]:
    """Return the numbers of one-number shapes."""
    return [value for (value,) in shapes]


def whole_numbers(value: object, spelling: str, least: int = 1) -> list[int]:
    """Return `value`, a list of whole numbers above 0, in the given order.

    Raises InputError, naming `spelling`, for anything else, and for fewer than `least` of them.
    """
    if not isinstance(value, list) or len(value) < least or not all(type(item) is int and item > 0 for item in value):
        raise InputError(f"{spelling} must be a list of whole numbers above 0, as in [1, 2, 4, 8]")
    return value


def numbers(value: object, spelling: str) -> tuple[Shape, ...]:
    """Parse `value` with `whole_numbers` and return shapes."""
    return shapes(whole_numbers(value, spelling))


def written_numbers(text: str, spelling: str) -> tuple[Shape, ...]:
    """Parse whole numbers above 0 separated by blanks or commas, as in flags, variables and logs. Raises InputError."""
    words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    if not words or not all(word.isdecimal() and len(word) < 10 and int(word) for word in words):
        raise InputError(f"{spelling} must be whole numbers above 0, as in 1 2 4 8")
    return shapes(map(int, words))


def logged(
    lines: Iterable[str], patterns: Mapping[str, re.Pattern[str]], spelled: Mapping[str, str]
) -> dict[str, tuple[Shape, ...]]:
    """Return by family the last list that one of `lines` has in group 1 of the family's pattern.

    `spelled` are the names for errors. Raises InputError like `written_numbers`.
    """
    found = {}
    for text in lines:
        for family, pattern in patterns.items():
            if match := pattern.search(text):
                found[family] = written_numbers(match[1], spelled[family])
    return found


def doubling(least: int, most: int) -> list[int]:
    """Return least, 2 · least, 4 · least … below `most`, then `most`."""
    found = []
    while least < most:
        found.append(least)
        least *= 2
    return [*found, most]


def choose(
    demands: Mapping[Shape, GraphDemand],
    candidates: Iterable[int],
    required: Iterable[int],
    most: int,
    work: Callable[[int], float] = float,
) -> tuple[Shape, ...]:
    """Return at most `most` of `candidates` that pad the steps of `demands` least, including all `required` ones.

    A step runs in the least chosen number at or above its own; steps above the largest candidate run without a graph
    and are not counted. `work` of a number is the cost of one run, and rises with it. Exact: dynamic programming over
    the candidates (optimise/line.py). Raises InputError where `required` are more than `most`.
    """
    needed = set(required)
    if len(needed) > most:
        allowed = counted(most, "graph")
        raise InputError(f"at most {allowed}, but at least {len(needed)} are needed: {_few(sorted(needed))}")
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


def most_frequent(demands: Mapping[Shape, GraphDemand], candidates: Iterable[int], most: int) -> tuple[Shape, ...]:
    """Return the `most` candidates with the most steps, for a look-up that only takes equal numbers (`Exact`)."""
    admitted = set(candidates)
    ranked = sorted((-demand.steps, shape) for shape, demand in demands.items() if shape[0] in admitted)
    return tuple(sorted(shape for _, shape in ranked[:most]))


def _few(values: Sequence[int]) -> str:
    return ", ".join(map(str, values[:8])) + (", …" if len(values) > 8 else "")
