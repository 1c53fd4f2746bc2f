"""How a fake device takes steps, and what it has: the suffix of its name.

fake             buckets when specialised, else one sequence's prompt or a token of each of the first slots
fake:ragged      rows of any lengths in any slots
fake:paged=N     so, and all slots share N tokens in blocks of BLOCK_TOKENS
fake:graphs=N    buckets; it has N bytes of memory, and captures graphs in it
fake:portable    buckets; executables are portable until a host with a card finishes them

A finished executable is the portable one with the member "card", the name of the card that it runs on. A host has no
card, unless a test puts one in (`here`).
"""

from __future__ import annotations

from dataclasses import dataclass

from llmc.errors import InputError

BLOCK_TOKENS = 4
PORTABLE = "portable"


@dataclass(frozen=True)
class FakeKind:
    """`cache_tokens` of the pool that all slots share, `graph_memory` in bytes; None: it has no such thing."""

    ragged: bool = False
    cache_tokens: int | None = None
    graph_memory: int | None = None

    @classmethod
    def of(cls, detail: str) -> FakeKind:
        """From what is behind the name: "", "portable", "ragged", "paged=N" or "graphs=N"; raises InputError."""
        name, _, text = detail.partition("=")
        number = int(text) if text.isascii() and text.isdecimal() else 0
        if name == "paged" and number >= BLOCK_TOKENS:
            return cls(ragged=True, cache_tokens=number)
        if name == "graphs" and number:
            return cls(graph_memory=number)
        if detail not in ("", PORTABLE, "ragged"):
            raise InputError(
                f"--device fake:{detail}: behind the name may be ragged, paged=N, N tokens from {BLOCK_TOKENS}, "
                f"graphs=N, N bytes of memory, or {PORTABLE}"
            )
        return cls(ragged=detail == "ragged")


@dataclass(frozen=True)
class FakeCard:
    """A card, and the driver that it runs with."""

    name: str = "fake-1"
    driver: str = "1.0"


here: FakeCard | None = None
"""The card of this host."""
