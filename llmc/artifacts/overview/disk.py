"""Disk usage of a store by kind of entry, by device, and by time since last use."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from llmc.artifacts.bundle.stored import KIND as BUNDLE
from llmc.artifacts.key import LOCAL
from llmc.artifacts.overview.survey import Listed, Survey

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
    for name in sorted(found, key=lambda name: (name == BUNDLE, name.startswith(LOCAL), name)):
        for digest in _digests(found[name]):
            owner.setdefault(digest, name)
    bundled = _digests(one for one in survey.entries if one.entry.key.kind == BUNDLE)
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
