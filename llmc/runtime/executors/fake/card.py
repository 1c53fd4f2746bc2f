"""The card of the fake device. A host has none, so bundles of `fake:portable` stay portable, unless a test puts one in.

A finished executable is the portable one with the member "card", the name of the card that it runs on.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """A card, and the driver that it runs with."""

    name: str = "fake-1"
    driver: str = "1.0"


here: Card | None = None
"""The card of this host."""
