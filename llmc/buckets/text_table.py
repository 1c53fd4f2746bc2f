"""Plain-text tables for reports, and the shares in them."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """One line for each row, columns two spaces apart: left-aligned, or right-aligned those in `right`."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(_align(row, widths, right)).rstrip() for row in rows]


def percent(fraction: float | None) -> str:
    """0.118 as "11.8%"; "–" for None."""
    return "–" if fraction is None else f"{fraction:,.1%}"


def _align(row: Sequence[str], widths: Sequence[int], right: Collection[int]) -> list[str]:
    return [
        cell.rjust(width) if column in right else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
