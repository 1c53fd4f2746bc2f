"""A store at one moment: its entries, what each of them holds, and which of them stay."""

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
    """An entry, the bytes of its blobs, and when it, or a bundle folder of it, was used last (seconds since 1970).

    What is pinned or in use is not collected; what is not whole lacks blobs.
    """

    entry: Entry
    share: Share
    used: float
    pinned: bool
    in_use: bool
    whole: bool

    @property
    def name(self) -> str:
        """What the inventory calls it."""
        return entry_name(self.entry.key)


@dataclass(frozen=True)
class Survey:
    """What a store holds at `now`. `entries` are by kind and then last use, newest first; `damaged` were left out."""

    root: Path
    now: float
    entries: Sequence[Listed]
    inventory: Inventory
    usage: StoreUsage
    damaged: int

    @property
    def layout(self) -> Layout:
        """Where the store keeps its files; nothing is moved there."""
        return Layout(self.root, read_only=True)

    def stays(self, name: str, item: Item) -> bool:
        """Whether an item is pinned or in use."""
        return name in self.inventory.pinned or not item.names.isdisjoint(self.inventory.held)


def take(store: Store) -> Survey:
    """The survey of a store. Damaged entries are put aside, as by `Store.entries`; blobs are not read."""
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
