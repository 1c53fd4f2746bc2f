"""What plugin.c counted, added up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple


class Counts(NamedTuple):
    """Of a whole interval, or of a part of it."""

    instructions: float
    loaded: float
    """Bytes."""
    stored: float

    def __add__(self, other: Counts) -> Counts:  # type: ignore[override]
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))

    def per(self, count: int) -> Counts:
        return Counts(*(a / count for a in self))


NONE = Counts(0, 0, 0)


def read(file: Path, part: Callable[[str, int], str]) -> Mapping[str, Counts]:
    """The counts of each part; `part` names the part of a file's name and a place in it."""
    found: dict[str, Counts] = defaultdict(lambda: NONE)
    for line in file.read_text().splitlines():
        instructions, loaded, stored, offset, name = line.split(" ", 4)
        found[part(name, int(offset, 16))] += Counts(int(instructions), int(loaded), int(stored))
    return found
