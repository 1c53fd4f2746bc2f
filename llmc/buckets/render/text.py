"""Plain text for people: tables, shares, sizes in bytes, and names of any origin."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return one line for each row, columns two spaces apart: left-aligned, or right-aligned those in `right`."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(_align(row, widths, right)).rstrip() for row in rows]


def percent(fraction: float | None) -> str:
    """Return 0.118 as "11.8%", None as "–"."""
    return "–" if fraction is None else f"{fraction:,.1%}"


def _align(row: Sequence[str], widths: Sequence[int], right: Collection[int]) -> list[str]:
    return [
        cell.rjust(width) if column in right else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(count: float) -> str:
    """Return `count` bytes with four digits: "504 MiB", "7.923 GiB"; negative where memory was released."""
    unit = 0
    while abs(count) >= 1024 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.4g} {UNITS[unit]}"


def printable(text: str) -> str:
    """Return `text` with unprintable characters replaced by "?"."""
    return "".join(character if character.isprintable() else "?" for character in text)


def shortened(text: str, most: int) -> str:
    """Return at most `most` characters of `text`, the middle left out."""
    if len(text) <= most:
        return text
    return f"{text[: most - most // 3 - 1]}…{text[len(text) - most // 3 :]}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number and its noun: "1 bucket", "1,200 buckets"; `plural` where it is not the noun and an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
