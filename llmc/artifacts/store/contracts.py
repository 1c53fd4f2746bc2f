"""What a store is handed: a far tier, and who decides which results may be used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from llmc.artifacts.key import Key
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.layout import Layout
    from llmc.artifacts.store.workspace import Area


class Upstream(Protocol):
    """A far tier that a store asks before it builds (see remotes/read_through.py)."""

    def fetch(self, key: Key, area: Area) -> Entry | None:
        """The entry of `key`, verified, trusted, and with all of its blobs put into `area`; else None.

        Never raises because the far side is away, wrong or not trusted: that is logged and is a miss. Raises
        CapacityError or UnwritableError when `area` has no room.
        """
        ...


class Guard(Protocol):
    """Decides whether a store may be used for a result (see local/opening.py). It is pickled with the store."""

    def require(self, key: Key, entry: Entry | None, layouts: Sequence[Layout]) -> None:
        """Raise ArtifactError if what is, or will be, under `key` may not be used from any of the stores.

        `entry` is what was found; None before a search.
        """
        ...
