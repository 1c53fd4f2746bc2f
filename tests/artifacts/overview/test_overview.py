"""What a store's page tells, as data: where bytes are, what bundles share and who signed them, what goes first."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from llmc.artifacts.bundle.manifest import FILE_NAME, Manifest
from llmc.artifacts.bundle.stored import bundle_key, bundle_meta, checkout, publish_bundle
from llmc.artifacts.digest import Blob, digest_bytes
from llmc.artifacts.gc import collect
from llmc.artifacts.key import Key
from llmc.artifacts.overview import pictures, tables
from llmc.artifacts.overview import survey as disk
from llmc.artifacts.overview.survey import HeldBundle, Survey, bundles, take
from llmc.artifacts.overview.tables import by_limit, in_order
from llmc.artifacts.signing.keyring import Keyring, TrustedKeys
from llmc.artifacts.store.entries import Entries, Entry
from llmc.artifacts.store.layout import Layout
from llmc.artifacts.store.leases import pin
from llmc.artifacts.store.store import Store
from llmc.cli.options import duration, size
from tests.artifacts.gc.collecting import DAY, SIZE, fill, key, use
from tests.artifacts.helpers import CONTENT, DIGESTS, child, files_below, finish, flip, manifest, mounted, truncate
from tests.artifacts.helpers import key as executable
from tests.artifacts.signing.helpers import signer


@pytest.fixture
def keyring(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path / "trusted")


def add(layout: Layout, signature: bytes | None = None, **changes: object) -> Manifest:
    """A bundle over CONTENT in the store, put there by a process that has ended."""
    store, built = Store(layout.root), manifest(**changes)
    for content in CONTENT.values():
        store.put_bytes(content)
    publish_bundle(store, built, signature)
    return built


def survey(layout: Layout) -> Survey:
    return take(Store(layout.root))


def held(layout: Layout, keyring: Keyring) -> HeldBundle:
    (one,) = bundles(survey(layout), keyring)
    return one


def rows(survey: Survey, keyring: Keyring, heading: str) -> list[tuple[str, ...]]:
    """The rows of the one table whose heading begins so."""
    sections = tables.sections(survey, bundles(survey, keyring), lambda entry: f"made as {entry.key.short}")
    (found,) = [table for part in sections for table in part.tables if table.heading.startswith(heading)]
    return list(found.rows)


def test_every_byte_counts_in_one_place(layout: Layout, keyring: Keyring) -> None:
    add(layout)
    fill(layout, 1, 2, shared=CONTENT["weights"])
    store = Store(layout.root)
    checkout(store, store.entries("bundle")[0])
    store.put_bytes(b"named by nobody")
    layout.quarantine.mkdir()
    (layout.quarantine / "torn").write_bytes(b"torn")
    found = survey(layout)
    groups = {group.name: group for group in disk.kinds(found)}
    assert (groups["k"].apart, groups["k"].bundled) == (2 * SIZE, 5000), (
        "weights came from there, and a bundle has them"
    )
    assert groups["bundle"].apart == 0
    assert disk.unnamed(found) == len(b"named by nobody")
    usage, locations = found.usage, sum(group.size for group in groups.values()) + disk.unnamed(found)
    assert locations + usage.entry_bytes + usage.bundle_bytes + usage.other_bytes == usage.total
    *parts, whole = [float(row[1]) for row in rows(found, keyring, "By location")]
    assert whole == pytest.approx(usage.total / 1024, abs=0.01) == pytest.approx(sum(parts), abs=0.05)


def test_executables_are_reported_apart_by_device_and_state(store: Store) -> None:
    blobs = [store.put_bytes(bytes([number]) * 100 * (number + 1)) for number in range(3)]
    store.publish(executable(), {"graph": blobs[0]})
    store.publish(executable(target="tpu", **{"input.topology": "v5e-2x2"}), {"graph": blobs[1]})
    store.publish(executable(target="tpu", state="native", **{"input.topology": "v5e-2x2"}), {"graph": blobs[2]})
    found = [(group.name, group.entries, group.size) for group in disk.devices(take(store))]
    assert found == [("tpu:v5e-2x2, native", 1, 300), ("tpu:v5e-2x2, portable", 1, 200), ("fake, portable", 1, 100)]


def test_bytes_are_as_old_as_the_last_use_of_any_entry_that_names_them(layout: Layout) -> None:
    fill(layout, 1, 2, 3, shared=b"s" * 500)
    now = time.time()
    for number, days in ((1, 200), (2, 10), (3, 10)):
        use(layout, number, now - days * DAY)
    pin(layout, key(3))
    ages = {age.name: (age.free, age.kept) for age in disk.ages(survey(layout))}
    assert ages["a year"] == (SIZE, 0)
    assert ages["30 days"] == (SIZE, SIZE + 500)
    assert sum(map(sum, ages.values())) == 3 * SIZE + 500


def test_a_bundle_says_what_it_is_and_what_it_shares(layout: Layout, keyring: Keyring) -> None:
    plan = "5b0fcc335ec793914139"
    built = add(layout, provenance={"plan": plan})
    one = held(layout, keyring)
    assert (one.model, one.device, one.graphs, one.plan, one.signed, one.problem) == (
        "tiny", "cpu", "2", plan[:12], "no", "",
    )  # fmt: skip
    assert one.between.shared == 0
    add(layout, device="hpu")
    other = next(one for one in bundles(survey(layout), keyring) if one.device == "cpu")
    assert (other.between.own, other.between.shared) == (len(built.to_bytes()), built.size)


def test_a_bundle_says_who_signed_it(layout: Layout, keyring: Keyring, tmp_path: Path) -> None:
    us = signer(tmp_path, 1)
    add(layout, us.sign(manifest().to_bytes(), None))
    assert held(layout, keyring).signed == f"by {us.public.short}, not trusted here"
    TrustedKeys(tmp_path / "trusted").add(tmp_path / "key1.pub", "release")
    assert held(layout, keyring).signed == "by release"
    add(layout, us.sign(manifest(device="hpu").to_bytes(), None))
    one = held(layout, keyring)
    assert one.signed == "?" and "its signature is not valid" in one.problem


def test_what_is_wrong_with_a_bundle_is_reported_and_nothing_is_moved(layout: Layout, keyring: Keyring) -> None:
    built = add(layout)
    content = layout.blob(digest_bytes(built.to_bytes()))
    flip(content)
    assert "missing or damaged; `llmc cache verify` shows details" in held(layout, keyring).problem
    truncate(content)
    assert "missing or damaged" in held(layout, keyring).problem
    assert content.exists() and not layout.quarantine.exists() and not files_below(layout.leases)
    content.unlink()
    one = held(layout, keyring)
    assert "missing or damaged" in one.problem
    assert (one.model, one.device, one.graphs, one.signed) == ("tiny", "cpu", "2", "?"), "what its entry says"
    assert "blobs are missing" in rows(survey(layout), keyring, "In the store")[0]


@pytest.mark.parametrize(
    ("outputs", "problem"),
    [
        ({}, "it names no manifest.json"),
        ({FILE_NAME: Blob(DIGESTS["weights"], 1 << 40)}, "larger than"),
        ({FILE_NAME: Blob(DIGESTS["tokenizer"], len(CONTENT["tokenizer"]))}, "not a manifest of a bundle"),
    ],
)
def test_an_entry_that_is_no_bundle_is_reported(
    layout: Layout, keyring: Keyring, outputs: dict[str, Blob], problem: str
) -> None:
    store = Store(layout.root)
    for content in CONTENT.values():
        store.put_bytes(content)
    Entries(layout).adopt(Entry(Key("bundle", {"manifest": DIGESTS["weights"]}), outputs, {"model": 7}, 0.0, 0.0))
    one = held(layout, keyring)
    assert problem in one.problem and one.model == "7"


@pytest.mark.parametrize("shared", [None, b"s" * 700])
def test_the_limits_tell_what_a_collection_would_do(layout: Layout, shared: bytes | None) -> None:
    fill(layout, *range(8), shared=shared)
    use(layout, 0, time.time() - 40 * DAY)
    pin(layout, key(1))
    reported = by_limit(survey(layout))
    assert [one.limit for one in reported] == [
        "", "--max-age 90d", "--max-age 30d", "--max-age 7d", "--max-age 1d",
        "--max-size 64KiB", "--max-size 32KiB", "--max-size 16KiB", "--max-size 8KiB",
    ]  # fmt: skip
    for one in reported:
        flag, _, value = one.limit.partition(" ")
        limit = size(flag, value) if flag == "--max-size" else None
        age = duration(flag, value) if flag == "--max-age" else None
        done = collect(layout, max_size=limit, max_age=age, dry_run=True)
        assert (one.items, one.freed, one.left) == (done.entries, done.freed, done.after), one
    assert reported[-1].kept == "1 pinned" and reported[2].items == 1


def test_what_goes_first_is_what_a_collection_takes_first(layout: Layout) -> None:
    fill(layout, *range(6), shared=b"s" * 700)
    pin(layout, key(2))
    order = in_order(survey(layout))
    assert [stage.name.rpartition("/")[2] for stage in order] == [key(number).hex for number in (0, 1, 3, 4, 5)]
    assert order[1].freed == order[0].left - order[1].left
    for stage in order[:3]:
        assert collect(layout, max_size=stage.left).after == stage.left
        assert not layout.entry("k", stage.name.rpartition("/")[2]).exists()


def test_a_store_that_does_not_exist_has_nothing(layout: Layout, keyring: Keyring) -> None:
    found = survey(layout)
    assert bundles(found, keyring) == [] and in_order(found) == [] and disk.kinds(found) == []
    assert {(one.items, one.freed, one.left) for one in by_limit(found)} == {(0, 0, 0)}
    assert rows(found, keyring, "By location")[-1] == ("all", "0.00", "–")
    assert not layout.root.exists()


def test_of_many_entries_some_are_listed_and_the_heading_says_so(
    layout: Layout, keyring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MAX_ROWS", 3)
    fill(layout, *range(5))
    for number in range(5):
        pin(layout, key(number))
    found = survey(layout)
    listed = rows(found, keyring, "Not used for longest (5, the first 3 of them)")
    assert [row[1] for row in listed] == [key(number).short for number in range(3)]
    for heading in ("The largest (5, the", "Kept whatever the limits are (5, the"):
        assert len(rows(found, keyring, heading)) == 3
    assert rows(found, keyring, "What --max-size takes first (0)") == []


def test_a_pin_without_an_entry_and_a_folder_without_one_are_listed(layout: Layout, keyring: Keyring) -> None:
    fill(layout, 1)
    pin(layout, key(1))
    layout.entry("k", key(1).hex).unlink()
    built = add(layout)
    store = Store(layout.root)
    folder = checkout(store, store.entries("bundle")[0])
    del store
    layout.entry("bundle", bundle_key(built).hex).unlink()
    os.utime(folder, (time.time() - DAY,) * 2)
    found = survey(layout)
    assert rows(found, keyring, "Kept")[0][1:3] == (key(1).short, "not in the store now")
    assert "a bundle folder alone" in rows(found, keyring, "What --max-size")[0]


def test_a_name_of_any_kind_is_a_short_cell_that_can_be_shown(layout: Layout, keyring: Keyring) -> None:
    store = Store(layout.root)
    built = manifest(model={"name": "\x1b[31m\x00" + "x" * 5000})
    store.publish(bundle_key(manifest()), {}, bundle_meta(built))
    (row,) = rows(take(store), keyring, "In the store")
    assert row[0].startswith("?[31m?x") and len(row[0]) == tables.LONGEST and row[0].isprintable()


@pytest.mark.full
def test_a_store_on_a_read_only_mount_is_drawn(mounts: None, layout: Layout, tmp_path: Path) -> None:
    """One with a damaged entry, which stays where it is."""
    add(layout)
    fill(layout, 1)
    layout.entry("k", key(1).hex).write_bytes(b"torn")
    before = files_below(layout.root)
    script = """
        import sys
        from llmc.cli.main import main
        sys.exit(main(["cache", "ls", "--cache-dir", sys.argv[1], "--plot", sys.argv[2]]))
    """
    root, page = layout.root, tmp_path / "page.html"
    read_only = mounted(f"mount --bind {root} {root} && mount -o remount,ro,bind {root}")
    assert finish(child(script, root, page, before=read_only)) == ""
    assert "Damaged entries, left out: 1;" in page.read_text()
    assert files_below(layout.root) == before


def test_many_kinds_are_one_bar_after_the_largest(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MOST_BARS", 2)
    for index, kind in enumerate(("a", "b", "c", "d"), 1):
        store.publish(Key(kind, {}), {"blob": store.put_bytes(kind.encode() * 100 * index)})
    bars = pictures.plots(take(store), [])[0].draw.keywords["bars"]  # type: ignore[attr-defined]
    assert bars[:3] == [("d", 400, 0), ("c", 300, 0), ("other kinds", 300, 0)]
