"""NVIDIA cards that are compiled for, one file each; each is read when it is asked for.

A card that is missing is one file beside these and one line here.
"""

from __future__ import annotations

from importlib import import_module

from llmc.compiler.targets.cuda.cards.base import Card

NAMES = (
    "a10g", "a100", "a100-40gb", "l4", "l40s", "h100", "h100-pcie", "h20", "h200", "b200", "gb200", "b300",
    "rtx-pro-6000",
)  # fmt: skip
"""As users write them, by generation, oldest first."""


def card_of(name: str) -> Card | None:
    """The card of a name; None for an unknown one."""
    if name not in NAMES:
        return None
    found: Card = import_module(f"{__name__}.{name.replace('-', '_')}").CARD
    return found


def cards() -> list[Card]:
    """All of them, in the order of NAMES."""
    return [card for name in NAMES if (card := card_of(name))]
