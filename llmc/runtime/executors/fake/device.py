"""Variants of the fake device, selected by the suffix of its name.

fake             buckets when specialised, otherwise one sequence's prompt or a token of each of the first slots
fake:ragged      rows of any lengths in any slots
fake:paged=N     ragged; all slots share N tokens in blocks of BLOCK_TOKENS
fake:graphs=N    buckets; it has N bytes of memory, and captures graphs in it
fake:portable    buckets; executables are portable until a host with a fake GPU compiles them on the target

A target-compiled executable is the portable one with the member "gpu", the name of its fake GPU. A host has none
unless a test adds one (`here`).
"""

from __future__ import annotations

from dataclasses import dataclass

from llmc.errors import InputError

BLOCK_TOKENS = 4
PORTABLE = "portable"


@dataclass(frozen=True)
class FakeKind:
    """`cache_tokens` of the pool that all slots share, `graph_memory` in bytes; None: not available."""

    ragged: bool = False
    cache_tokens: int | None = None
    graph_memory: int | None = None

    @classmethod
    def of(cls, detail: str) -> FakeKind:
        """Parse the name's suffix: "", "portable", "ragged", "paged=N" or "graphs=N"; raises InputError."""
        name, _, text = detail.partition("=")
        number = int(text) if text.isascii() and text.isdecimal() else 0
        if name == "paged" and number >= BLOCK_TOKENS:
            return cls(ragged=True, cache_tokens=number)
        if name == "graphs" and number:
            return cls(graph_memory=number)
        if detail not in ("", PORTABLE, "ragged"):
            raise InputError(
                f"--device fake:{detail}: the suffix may be ragged, paged=N, N tokens from {BLOCK_TOKENS}, "
                f"graphs=N, N bytes of memory, or {PORTABLE}"
            )
        return cls(ragged=detail == "ragged")


@dataclass(frozen=True)
class FakeGpu:
    """A fake GPU and its driver."""

    name: str = "fake-1"
    driver: str = "1.0"


here: FakeGpu | None = None
"""The fake GPU of this host."""
