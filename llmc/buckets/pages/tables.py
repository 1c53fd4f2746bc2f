"""What pages and notebooks show: tables, and grids of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Cells = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table: (name, right-aligned) of its columns, its rows, and what is left out of them."""

    heading: str
    header: tuple[tuple[str, bool], ...]
    rows: Sequence[Cells]
    note: str = ""
    sortable: bool = False


@dataclass(frozen=True)
class Section:
    """Tables and notes under one heading."""

    heading: str
    tables: list[Table]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Grid:
    """A number at each of `rows` × `columns`, empty where it is 0; `shades`, 0 to 1, say how dark each is drawn."""

    heading: str
    corner: str
    columns: Sequence[str]
    rows: Sequence[str]
    numbers: Sequence[Sequence[int]]
    shades: Sequence[Sequence[float]]
    note: str = ""


def columns(names: Sequence[str], left: int) -> tuple[tuple[str, bool], ...]:
    """`names` as a header, the first `left` columns aligned to the left."""
    return tuple((name, place >= left) for place, name in enumerate(names))


def counts(*values: int) -> Cells:
    """Numbers as cells hold them."""
    return tuple(f"{value:,}" for value in values)
