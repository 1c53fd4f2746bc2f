"""How much of what an entry names is its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from llmc.artifacts.digest import Blob
from llmc.artifacts.store.entries import Entry


class Share(NamedTuple):
    """Bytes of an entry's blobs: `own` are those that no other entry names, and that go with it."""

    own: int
    shared: int

    @property
    def size(self) -> int:
        """All of them, each blob once."""
        return self.own + self.shared


def shares(entries: Iterable[Entry]) -> Mapping[str, Share]:
    """What each entry holds alone, by the digest of its key; `entries` are all that a store has."""
    blobs = {entry.key.digest: frozenset(entry.outputs.values()) for entry in entries}
    names: Counter[Blob] = Counter(blob for found in blobs.values() for blob in found)
    return {digest: _share(found, names) for digest, found in blobs.items()}


def _share(blobs: frozenset[Blob], names: Mapping[Blob, int]) -> Share:
    own = sum(blob.size for blob in blobs if names[blob] == 1)
    return Share(own, sum(blob.size for blob in blobs) - own)
