"""The tables of the page. Sizes share one unit and times are in days, so that a click on a column sorts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmc.artifacts.gc import GRACE_SECONDS, CollectionStage, RetentionLimits, decide, size_of, stages
from llmc.artifacts.overview.survey import DAY, MOST_READ, HeldBundle, Listed, Survey, devices, kinds, unnamed
from llmc.artifacts.store.entries import Entry
from llmc.artifacts.store.leases import pins
from llmc.artifacts.store.locks import is_local
from llmc.buckets.render.page import Section, Table, columns
from llmc.buckets.render.text import UNITS, percent, printable, size_text
from llmc.paths import is_dir

DAYS = (90, 30, 7, 1)
SIZES = 4
"""Number of size limits to try: powers of two below the store's size, largest first."""


class Freed(NamedTuple):
    """The effect of a limit: results removed, bytes freed, bytes left, and the results kept, by reason."""

    limit: str
    items: int
    freed: int
    left: int
    kept: str


def by_limit(survey: Survey) -> list[Freed]:
    """Return what `llmc cache gc` would remove without a limit, and under some limits of each kind."""
    found = []
    for limit, max_size, max_age in _tried(size_of(survey.inventory)):
        plan = decide(survey.inventory, _limits(survey, max_size, max_age))
        kept = ", ".join(f"{count} {why}" for why, count in sorted(plan.kept.items()))
        found.append(Freed(limit, len(plan.items), plan.freed, plan.size, kept))
    return found


def in_order(survey: Survey) -> list[CollectionStage]:
    """Return what an ever smaller size limit removes, in order, until only protected items are left."""
    return stages(survey.inventory, _limits(survey, None, None))


def _tried(size: int) -> Iterator[tuple[str, int | None, float | None]]:
    yield "", None, None
    for days in DAYS:
        yield f"--max-age {days}d", None, days * 86400.0
    for power in range(SIZES):
        exponent = max(0, size - 1).bit_length() - 1 - power
        unit = min(exponent // 10, len(UNITS) - 1)
        if exponent >= 0:
            yield f"--max-size {1 << exponent - 10 * unit}{UNITS[unit]}", 1 << exponent, None


def _limits(survey: Survey, max_size: int | None, max_age: float | None) -> RetentionLimits:
    alone = is_dir(survey.layout.base) and is_local(survey.layout.base)
    return RetentionLimits(max_size, max_age, GRACE_SECONDS, survey.now, alone)


MAX_ROWS = 500
"""Most rows of a table."""

LONGEST = 60
"""Longest cell, in characters."""

PROBLEMS_SHOWN = 5
SMALL = 16 << 20
"""Store size in bytes below which sizes are shown in KiB instead of MiB."""

Describe = Callable[[Entry], str]


@dataclass(frozen=True)
class _Form:
    unit: str
    bytes: int
    now: float

    def size(self, count: int) -> str:
        return f"{count / self.bytes:,.2f}"

    def days(self, moment: float) -> str:
        return f"{max(0.0, self.now - moment) / DAY:,.2f}"


def sections(survey: Survey, held: Sequence[HeldBundle], describe: Describe) -> list[Section]:
    """Return all tables of a store: the disk, bundles, entries, what would be collected, and pins."""
    unit, size = ("KiB", 1 << 10) if survey.usage.total < SMALL else ("MiB", 1 << 20)
    form = _Form(unit, size, survey.now)
    return [
        _disk(survey, form),
        _bundles(held, form),
        _entries(survey, describe, form),
        _freeing(survey, describe, form),
        _pins(survey, describe, form),
    ]


def _disk(survey: Survey, form: _Form) -> Section:
    usage, left = survey.usage, unnamed(survey)
    locations = (
        ("blobs that entries name", usage.blob_bytes - left),
        ("blobs that no entry names", left),
        ("entries", usage.entry_bytes),
        ("bundle folders, without what are blobs too", usage.bundle_bytes),
        ("quarantine and temporaries", usage.other_bytes),
        ("all", usage.total),
    )
    tables = [
        Table(
            "By location",
            columns(("what", form.unit, "share"), 1),
            [(name, form.size(size), percent(size / usage.total if usage.total else None)) for name, size in locations],
        )
    ]
    for heading, what, groups in (
        ("Blobs by kind of entry", "kind", kinds(survey)),
        ("Executables by device", "device", devices(survey)),
    ):
        names = (what, "entries", form.unit, "in no bundle", "in bundles too", "days unused")
        rows = [
            _cells(
                group.name, f"{group.entries:,}", *map(form.size, (group.size, group.apart, group.bundled)),
                form.days(group.used),
            )
            for group in groups[:MAX_ROWS]
        ]  # fmt: skip
        tables.append(_table(heading, names, 1, rows))
    notes = [f"{survey.usage.entries:,} entries and {usage.blobs:,} blobs; each file and each blob counts once."]
    if survey.damaged:
        notes.append(f"Damaged entries, left out: {survey.damaged:,}; `llmc cache verify` shows details.")
    return Section("What is on the disk", tables, tuple(notes))


def _bundles(held: Sequence[HeldBundle], form: _Form) -> Section:
    names = (
        "model", "device", "plan", "key", "signed", "state", "graphs", form.unit, "own", "shared",
        "days unused",
    )  # fmt: skip
    rows = [
        _cells(
            one.model, one.device, one.plan, one.listed.entry.key.short, one.signed, _state(one.listed), one.graphs,
            *map(form.size, (one.between.size, one.between.own, one.between.shared)), form.days(one.listed.used),
        )
        for one in held[:MAX_ROWS]
    ]  # fmt: skip
    notes = []
    if held:
        apart = sum(one.between.size for one in held)
        together = sum({blob.digest: blob.size for one in held for blob in one.listed.entry.outputs.values()}.values())
        notes.append(f"Apart, the bundles would take {size_text(apart)}; in the store they take {size_text(together)}.")
    if len(held) > MOST_READ:
        notes.append(f"The manifests of the {MOST_READ} used last were read; of the others there is what entries say.")
    problems = [one.problem for one in held if one.problem]
    notes += [printable(problem) for problem in problems[:PROBLEMS_SHOWN]]
    if len(problems) > PROBLEMS_SHOWN:
        notes.append(f"And {len(problems) - PROBLEMS_SHOWN:,} more bundles that cannot be read.")
    note = "own: what no other bundle has; shared: what others have too."
    return Section("Bundles", [_table(_counted("In the store", held), names, 6, rows, note)], tuple(notes))


def _entries(survey: Survey, describe: Describe, form: _Form) -> Section:
    names = ("kind", "key", "what", "state", form.unit, "own", "days unused")

    def table(heading: str, chosen: Sequence[Listed]) -> Table:
        rows = [
            _cells(
                one.entry.key.kind, one.entry.key.short, describe(one.entry), _state(one), form.size(one.share.size),
                form.size(one.share.own), form.days(one.used),
            )
            for one in chosen[:MAX_ROWS]
        ]  # fmt: skip
        return _table(_counted(heading, chosen), names, 4, rows, "own: what no other entry has.")

    largest = sorted(survey.entries, key=lambda one: -one.share.size)
    oldest = sorted(survey.entries, key=lambda one: one.used)
    return Section("Entries", [table("The largest", largest), table("Not used for longest", oldest)])


def _freeing(survey: Survey, describe: Describe, form: _Form) -> Section:
    limits = [
        _cells(
            f"llmc cache gc {one.limit}".strip(), one.kept or "–", f"{one.items:,}", form.size(one.freed),
            form.size(one.left),
        )
        for one in by_limit(survey)
    ]  # fmt: skip
    names = ("command", "kept in spite of it", "results", f"frees {form.unit}", f"leaves {form.unit}")
    known = {one.name: one for one in survey.entries}
    order, rows = in_order(survey), []
    for index, stage in enumerate(order[:MAX_ROWS], 1):
        one = known.get(stage.name)
        kind, _, key = stage.name.removeprefix("entries/").partition("/")
        what = "a bundle folder alone" if one is None else describe(one.entry)
        sizes = map(form.size, (stage.freed, stage.left))
        rows.append(
            _cells(f"{index:,}", kind, key[:12], what, *sizes, form.days(survey.inventory.items[stage.name].used))
        )
    header = ("order", "kind", "key", "what", f"frees {form.unit}", f"leaves {form.unit}", "days unused")
    first = _table(_counted("What --max-size takes first", order), header, 4, rows)
    note = "What dead processes left in temporaries goes too, and is not counted here."
    return Section("What llmc cache gc would remove", [_table("By limit", names, 2, limits, note), first])


def _pins(survey: Survey, describe: Describe, form: _Form) -> Section:
    known = {one.name: one for one in survey.entries}
    found, rows = pins(survey.layout), []
    for pin in found[:MAX_ROWS]:
        one = known.get(pin.name)
        what, size = ("not in the store now", 0) if one is None else (describe(one.entry), one.share.size)
        rows.append(_cells(pin.kind, pin.hex[:12], what, form.size(size), form.days(pin.since)))
    names = ("kind", "key", "what", form.unit, "days pinned")
    return Section("Pins", [_table(_counted("Kept whatever the limits are", found), names, 3, rows)])


def _state(listed: Listed) -> str:
    marks = (("pinned", listed.pinned), ("in use", listed.in_use), ("blobs are missing", not listed.whole))
    return ", ".join(name for name, holds in marks if holds)


def _table(heading: str, names: Sequence[str], left: int, rows: Sequence[tuple[str, ...]], note: str = "") -> Table:
    return Table(heading, columns(names, left), rows, note, sortable=True)


def _counted(heading: str, of: Sequence[object]) -> str:
    shown = f", the first {MAX_ROWS:,} of them" if len(of) > MAX_ROWS else ""
    return f"{heading} ({len(of):,}{shown})"


def _cells(*texts: str) -> tuple[str, ...]:
    return tuple(printable(text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…") for text in texts)
