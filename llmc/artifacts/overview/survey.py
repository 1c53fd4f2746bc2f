"""A store at one moment: its entries, their content, and which of them are protected."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmc.artifacts.gc.inventory import Counter, Inventory, Item
from llmc.artifacts.store.audit import Share, StoreUsage, shares
from llmc.artifacts.store.entries import Entry
from llmc.artifacts.store.layout import Layout
from llmc.artifacts.store.leases import entry_name
from llmc.artifacts.store.store import Store


@dataclass(frozen=True)
class Listed:
    """An entry, the bytes of its blobs, and the last use of it or its bundle folders (seconds since 1970).

    Pinned and used entries are not collected. An entry that is not `whole` lacks blobs.
    """

    entry: Entry
    share: Share
    used: float
    pinned: bool
    in_use: bool
    whole: bool

    @property
    def name(self) -> str:
        """The entry's name in the inventory."""
        return entry_name(self.entry.key)


@dataclass(frozen=True)
class Survey:
    """The content of a store at `now`.

    `entries` are sorted by kind and then last use, newest first. `damaged` entries were left out.
    """

    root: Path
    now: float
    entries: Sequence[Listed]
    inventory: Inventory
    usage: StoreUsage
    damaged: int

    @property
    def layout(self) -> Layout:
        """The store's files, read-only."""
        return Layout(self.root, read_only=True)

    def stays(self, name: str, item: Item) -> bool:
        """Whether an item is pinned or in use."""
        return name in self.inventory.pinned or not item.names.isdisjoint(self.inventory.held)


def take(store: Store) -> Survey:
    """Survey a store. Damaged entries are quarantined, as by `Store.entries`; blobs are not read."""
    entries = store.entries()
    now, layout = time.time(), Layout(store.root, read_only=True)
    inventory, found = Counter(layout).take(now), shares(entries)
    listed = [_listed(entry, found[entry.key.digest], inventory) for entry in entries]
    return Survey(store.root, now, listed, inventory, store.usage(), store.counters["corrupt"])


def _listed(entry: Entry, share: Share, inventory: Inventory) -> Listed:
    name = entry_name(entry.key)
    item = inventory.items.get(name)
    whole = all(blob.digest in inventory.blobs for blob in entry.outputs.values())
    used = entry.used if item is None else item.used
    in_use = item is not None and not item.names.isdisjoint(inventory.held)
    return Listed(entry, share, used, name in inventory.pinned, in_use, whole)
