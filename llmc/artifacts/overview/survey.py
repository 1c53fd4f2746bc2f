"""A store at one moment: its entries and which of them are protected, its bundles, and its disk usage."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from llmc.artifacts.bundle.manifest import FILE_NAME, MAX_BYTES, SIGNATURE_NAME, Manifest
from llmc.artifacts.bundle.stored import KIND, require_agreement
from llmc.artifacts.digest import Blob
from llmc.artifacts.gc import Inventory, InventoryTaker, Item
from llmc.artifacts.key import LOCAL
from llmc.artifacts.signing.keyring import Keyring
from llmc.artifacts.signing.keys import short_id
from llmc.artifacts.store.audit import Share, StoreUsage, shares
from llmc.artifacts.store.blobs import Blobs
from llmc.artifacts.store.entries import Entry
from llmc.artifacts.store.layout import Layout
from llmc.artifacts.store.leases import entry_name
from llmc.artifacts.store.store import Store
from llmc.errors import ArtifactError, DeviceError


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
    inventory, found = InventoryTaker(layout).take(now), shares(entries)
    listed = [_listed(entry, found[entry.key.digest], inventory) for entry in entries]
    return Survey(store.root, now, listed, inventory, store.usage(), store.counters["corrupt"])


def _listed(entry: Entry, share: Share, inventory: Inventory) -> Listed:
    name = entry_name(entry.key)
    item = inventory.items.get(name)
    whole = all(blob.digest in inventory.blobs for blob in entry.outputs.values())
    used = entry.used if item is None else item.used
    in_use = item is not None and not item.names.isdisjoint(inventory.held)
    return Listed(entry, share, used, name in inventory.pinned, in_use, whole)


MOST_READ = 500
"""Most bundles whose manifests are read, last used first; the others have only their entries' facts."""

UNKNOWN = "?"


@dataclass(frozen=True)
class HeldBundle:
    """A bundle; `between` splits its bytes into those of no other bundle (own) and those of others too (shared).

    `plan` is the digest of its plan, `signed` describes who signed it; both are "?" if they were not read. `problem`
    says what is wrong with it, or is "".
    """

    listed: Listed
    between: Share
    model: str
    device: str
    graphs: str
    plan: str
    signed: str
    problem: str


def bundles(survey: Survey, keyring: Keyring) -> list[HeldBundle]:
    """Return the bundles, most recently used first."""
    listed = sorted((one for one in survey.entries if one.entry.key.kind == KIND), key=lambda one: -one.used)
    between = shares(one.entry for one in listed)
    blobs = Blobs(survey.layout)
    return [
        _held(one, between[one.entry.key.digest], blobs if index < MOST_READ else None, keyring)
        for index, one in enumerate(listed)
    ]


def _held(listed: Listed, between: Share, blobs: Blobs | None, keyring: Keyring) -> HeldBundle:
    meta = listed.entry.meta
    model, device, graphs = (str(meta.get(name, UNKNOWN)) for name in ("model", "device", "executables"))
    plan = signed = UNKNOWN
    problem = ""
    if blobs is not None:
        try:
            manifest, signature = _read(listed, blobs)
            model, device = str(manifest.model.get("name", model)), manifest.device
            graphs, plan = f"{len(manifest.executables):,}", str(manifest.provenance.get("plan", UNKNOWN))[:12]
            signed = _signed(manifest, signature, keyring)
        except (ArtifactError, DeviceError) as error:
            problem = str(error)
    return HeldBundle(listed, between, model, device, graphs, plan, signed, problem)


def _read(listed: Listed, blobs: Blobs) -> tuple[Manifest, bytes | None]:
    """Like `read_bundle`, but mark nothing as used and move nothing damaged."""
    entry, source = listed.entry, f"bundle {listed.entry.key.short}"
    if FILE_NAME not in entry.outputs:
        raise ArtifactError(f"{source}: it names no {FILE_NAME}")
    manifest = Manifest.from_bytes(_content(entry.outputs[FILE_NAME], blobs, f"{source}: {FILE_NAME}"), source)
    signed = entry.outputs.get(SIGNATURE_NAME)
    signature = None if signed is None else _content(signed, blobs, f"{source}: {SIGNATURE_NAME}")
    require_agreement(entry, manifest, signature, source)
    return manifest, signature


def _content(blob: Blob, blobs: Blobs, source: str) -> bytes:
    if blob.size > MAX_BYTES:
        raise ArtifactError(f"{source}: larger than {MAX_BYTES} bytes")
    if blobs.find(*blob, verify=False) is None or (data := blobs.read(blob.digest)) is None:
        raise ArtifactError(f"{source}: missing or damaged; `llmc cache verify` shows details")
    return data


def _signed(manifest: Manifest, signature: bytes | None, keyring: Keyring) -> str:
    """Describe who signed it. Raises ArtifactError for an invalid signature, DeviceError if none can be checked."""
    if signature is None:
        return "no"
    verdict = keyring.check(manifest.to_bytes(), signature, manifest.source)
    if verdict.key is not None:
        return f"by {verdict.key.name}"
    keys = ", ".join(short_id(claimed) or "an unnamed key" for claimed in verdict.claimed)
    return f"by {keys}, not trusted here"


EXECUTABLE = "executable"
HOUR, DAY = 3600.0, 86400.0
AGES = (
    ("an hour", HOUR), ("a day", DAY), ("a week", 7 * DAY), ("30 days", 30 * DAY), ("90 days", 90 * DAY),
    ("a year", 365 * DAY), ("any time", float("inf")),
)  # fmt: skip
"""Ranges of time since last use: name and upper limit in seconds."""


class Group(NamedTuple):
    """Entries with something in common; `used` is the last use of any of them.

    `apart` and `bundled` are bytes on disk of blobs that no bundle has, and that a bundle has too. A blob counts in
    only one group.
    """

    name: str
    entries: int
    apart: int
    bundled: int
    used: float

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return self.apart + self.bundled


class Age(NamedTuple):
    """Bytes of blobs last used within a range of time: those that may be collected, and those pinned or in use."""

    name: str
    free: int
    kept: int


def kinds(survey: Survey) -> list[Group]:
    """Return the entries by kind, largest first.

    A blob that several kinds name counts for the kind that it came from: bundles consist of other kinds' blobs, and
    local kinds reuse those of the others.
    """
    return _groups(survey, [(one.entry.key.kind, one) for one in survey.entries])


def devices(survey: Survey) -> list[Group]:
    """Return the executables by target device and state, largest first."""
    return _groups(survey, [(_device(one), one) for one in survey.entries if one.entry.key.kind == EXECUTABLE])


def unnamed(survey: Survey) -> int:
    """Return the bytes of blobs that no entry names."""
    named = _digests(survey.entries)
    return sum(file.size for digest, file in survey.inventory.blobs.items() if digest not in named)


def ages(survey: Survey) -> list[Age]:
    """Return the bytes of named blobs by the time since any of their entries was used."""
    used: dict[str, float] = {}
    kept: set[str] = set()
    for name, item in survey.inventory.items.items():
        for digest in item.digests:
            used[digest] = max(used.get(digest, item.used), item.used)
        if survey.stays(name, item):
            kept |= item.digests
    sizes: Counter[tuple[str, bool]] = Counter()
    for digest, moment in used.items():
        if (file := survey.inventory.blobs.get(digest)) is not None:
            name = next(name for name, end in AGES if survey.now - moment < end)
            sizes[name, digest in kept] += file.size
    return [Age(name, sizes[name, False], sizes[name, True]) for name, _ in AGES]


def _device(listed: Listed) -> str:
    components = listed.entry.key.components
    device = ":".join(str(components[name]) for name in ("target", "input.topology") if components.get(name))
    return f"{device or '?'}, {components.get('state', '?')}"


def _groups(survey: Survey, members: Iterable[tuple[str, Listed]]) -> list[Group]:
    found: Mapping[str, list[Listed]] = defaultdict(list)
    for name, listed in members:
        found[name].append(listed)
    owner: dict[str, str] = {}
    for name in sorted(found, key=lambda name: (name == KIND, name.startswith(LOCAL), name)):
        for digest in _digests(found[name]):
            owner.setdefault(digest, name)
    bundled = _digests(one for one in survey.entries if one.entry.key.kind == KIND)
    apart: Counter[str] = Counter()
    in_bundles: Counter[str] = Counter()
    for digest, name in owner.items():
        if (file := survey.inventory.blobs.get(digest)) is not None:
            (in_bundles if digest in bundled else apart)[name] += file.size
    groups = [
        Group(name, len(several), apart[name], in_bundles[name], max(one.used for one in several))
        for name, several in found.items()
    ]
    return sorted(groups, key=lambda group: (-group.size, group.name))


def _digests(several: Iterable[Listed]) -> set[str]:
    return {blob.digest for listed in several for blob in listed.entry.outputs.values()}
