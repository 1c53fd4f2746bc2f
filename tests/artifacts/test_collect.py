"""Trimming a store: what goes, in which order, and what never does."""

from __future__ import annotations

import logging
import os
import shutil
import time
from pathlib import Path

import pytest

from llmc.artifacts import collect as module
from llmc.artifacts.blobs import Blob
from llmc.artifacts.bundle import BundleFiles
from llmc.artifacts.bundles import add_bundle, bundle_key, checkout
from llmc.artifacts.collect import Collection, collect
from llmc.artifacts.key import Key
from llmc.artifacts.layout import Layout
from llmc.artifacts.pins import Pin, pin, pins, unpin
from llmc.artifacts.publish import UnwritableError
from llmc.artifacts.store import Store
from llmc.errors import ArtifactError
from tests.artifacts.helpers import child, files_below, finish, manifest, mounted, sources

DAY = 24 * 3600.0
SIZE = 10_000


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "store")


def key(number: int) -> Key:
    return Key("k", {"number": number})


def content(number: int) -> bytes:
    return number.to_bytes(4, "big") * (SIZE // 4)


def fill(layout: Layout, *numbers: int, shared: bytes | None = None) -> None:
    """Entries used an hour apart, the first one longest ago, by a process that has ended."""
    store = Store(layout.root)
    for number in numbers:
        outputs = {"own": store.put_bytes(content(number))}
        if shared is not None:
            outputs["shared"] = store.put_bytes(shared)
        store.publish(key(number), outputs)
    now = time.time()
    for place, number in enumerate(numbers):
        use(layout, number, now - DAY - 3600.0 * (len(numbers) - place))


def use(layout: Layout, number: int, moment: float) -> None:
    os.utime(layout.entry("k", key(number).hex), (moment, moment))


def age_blobs(layout: Layout, seconds: float = DAY) -> None:
    for _, item in layout.all_blobs():
        os.utime(item.path, (time.time() - seconds,) * 2)


def kept(layout: Layout) -> list[int]:
    """The numbers of the entries that are there, with all of their blobs; nothing else may be there."""
    store = Store(layout.root)
    entries = store.entries("k")
    for entry in entries:
        for blob in entry.outputs.values():
            assert layout.blob(blob.digest).stat().st_size == blob.size
    return sorted(int(entry.key.components["number"] or 0) for entry in entries)


def own_size(layout: Layout) -> int:
    return layout.entry("k", key(1).hex).stat().st_size + SIZE


def test_the_least_recently_used_goes_first(layout: Layout) -> None:
    fill(layout, 1, 2, 3, 4)
    use(layout, 1, time.time())
    found = collect(layout, max_size=2 * own_size(layout) + SIZE // 2)
    assert kept(layout) == [1, 4]
    assert (found.entries, found.blobs, found.over) == (2, 2, 0)
    assert found.freed == found.before - found.after > 2 * SIZE
    assert files_below(layout.temporaries) == []


def test_within_the_limit_nothing_goes(layout: Layout) -> None:
    fill(layout, 1, 2)
    assert collect(layout, max_size=10 * SIZE, max_age=30 * DAY)[:4] == (0, 0, 0, 0)
    assert kept(layout) == [1, 2]


def test_what_was_not_used_for_long_goes(layout: Layout) -> None:
    fill(layout, 1, 2, 3)
    use(layout, 2, time.time() - 31 * DAY)
    assert collect(layout, max_age=30 * DAY).entries == 1
    assert kept(layout) == [1, 3]


def test_a_blob_that_another_entry_names_stays(layout: Layout) -> None:
    fill(layout, 1, 2, shared=b"weights" * 1000)
    found = collect(layout, max_size=own_size(layout) + 8000)
    assert kept(layout) == [2]
    assert found.blobs == 1, "its own, not the shared one"


def test_an_entry_whose_removal_frees_nothing_stays_if_it_fits(layout: Layout) -> None:
    """Executables of a bundle that is kept: building them again would cost time, and keeping them costs nothing."""
    fill(layout, 1, 2)
    store = Store(layout.root)
    store.publish(key(3), {"own": store.put_bytes(content(1))})
    del store
    found = collect(layout, max_size=own_size(layout) + 1000)
    assert kept(layout) == [1, 3]
    assert found.entries == 1


def test_garbage_goes_without_limits_but_not_what_is_new(layout: Layout) -> None:
    fill(layout, 1)
    Store(layout.root).put_bytes(b"old garbage")
    age_blobs(layout)
    new = Store(layout.root).put_bytes(b"a build may be about to name this")
    found = collect(layout)
    assert (found.blobs, found.freed, found.waiting) == (1, 11, new.size)
    assert Store(layout.root).has(new)
    assert kept(layout) == [1]
    assert collect(layout, grace=0).blobs == 1


def test_what_is_pinned_stays(layout: Layout) -> None:
    fill(layout, 1, 2)
    pin(layout, key(1))
    found = collect(layout, max_size=0, max_age=0)
    assert kept(layout) == [1]
    assert dict(found.kept) == {"pinned": 1}
    assert found.over == found.after == own_size(layout)
    unpin(layout, pins(layout)[0])
    assert collect(layout, max_size=0).after == 0


def test_a_pin_is_there_once_and_outlives_its_entry(layout: Layout) -> None:
    fill(layout, 1)
    with pytest.raises(ArtifactError, match="no entry k"):
        pin(layout, key(2))
    pin(layout, key(1))
    pin(layout, key(1))
    layout.entry("k", key(1).hex).unlink()
    (layout.pins / "a stranger").touch()
    assert [(item.kind, item.hex) for item in pins(layout)] == [("k", key(1).hex)]
    fill(layout, 1)
    collect(layout, max_size=0)
    assert kept(layout) == [1]
    unpin(layout, Pin("k", key(1).hex, 0.0))
    assert pins(layout) == []


def test_what_a_living_store_was_given_stays(layout: Layout) -> None:
    fill(layout, 1, 2)
    user = Store(layout.root)
    entry = user.lookup(key(1))
    assert entry is not None
    found = collect(layout, max_size=0)
    assert kept(layout) == [1]
    assert dict(found.kept) == {"in use": 1}
    assert user.path(entry.outputs["own"]).read_bytes() == content(1)
    del user
    assert collect(layout, max_size=0).entries == 1


def test_what_a_build_has_stored_stays_however_long_it_takes(layout: Layout) -> None:
    runs: list[int] = []

    def build(space):  # type: ignore[no-untyped-def]
        runs.append(1)
        blob = space.put_bytes(b"weights")
        age_blobs(layout)
        assert collect(layout, max_size=0).blobs == 0
        return {"weights": blob}

    store = Store(layout.root)
    assert store.get_or_build(key(1), build)[1] is False
    assert len(runs) == 1


def test_a_build_whose_blob_went_is_built_once_more(layout: Layout) -> None:
    runs: list[int] = []

    def build(space):  # type: ignore[no-untyped-def]
        runs.append(1)
        blob = space.put_bytes(b"weights")
        if len(runs) == 1:
            layout.blob(blob.digest).unlink()
        return {"weights": blob}

    entry, _ = Store(layout.root).get_or_build(key(1), build)
    assert len(runs) == 2
    assert Store(layout.root).get_bytes(entry.outputs["weights"].digest) == b"weights"


def test_a_collected_entry_is_a_clean_miss(layout: Layout, caplog: pytest.LogCaptureFixture) -> None:
    fill(layout, 1)
    reader = Store(layout.root)
    listed = reader.entries()
    collect(layout, max_size=0)
    with caplog.at_level(logging.WARNING, "llmc.artifacts"):
        assert reader.lookup(listed[0].key, verify=True) is None
    assert caplog.text == ""
    assert reader.counters["corrupt"] == 0
    assert files_below(layout.quarantine) == []


def test_an_entry_that_is_collected_while_it_is_looked_at_is_a_clean_miss(
    layout: Layout, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has read the entry; before it notes its use, everything goes."""
    from llmc.artifacts.entries import Entries

    fill(layout, 1)
    reader, original, calls = Store(layout.root), Entries.read, []

    def read(self: Entries, wanted: Key):  # type: ignore[no-untyped-def]
        found = original(self, wanted)
        if not calls:
            calls.append(1)
            collect(layout, max_size=0)
        return found

    monkeypatch.setattr(Entries, "read", read)
    with caplog.at_level(logging.WARNING, "llmc.artifacts"):
        assert reader.lookup(key(1), verify=True) is None
    assert caplog.text == ""
    assert reader.counters["corrupt"] == 0


def test_who_comes_while_things_are_moved_away_gets_them_back(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a gate: the user notes its use after the first look, and before the second."""
    fill(layout, 1, 2)
    user = Store(layout.root)
    original = module.in_use

    def second_look(where: Layout, now: float):  # type: ignore[no-untyped-def]
        user.hold(f"entries/k/{key(1).hex}")
        return original(where, now)

    monkeypatch.setattr(module, "in_use", second_look)
    collect(layout, max_size=0)
    assert kept(layout) == [1]
    assert files_below(layout.temporaries) == []


def test_a_blob_that_is_named_while_it_is_moved_away_comes_back(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(layout, 1)
    original = module._Run._park

    def park(self, name, paths):  # type: ignore[no-untyped-def]
        moved = original(self, name, paths)
        if name.startswith("sha256:"):
            Store(layout.root)._main.entries.write(key(2), {"own": Blob(name, SIZE)}, {})
        return moved

    monkeypatch.setattr(module._Run, "_park", park)
    collect(layout, max_age=12 * 3600)
    monkeypatch.undo()
    assert kept(layout) == [2]


# Bundles


def add(layout: Layout, tmp_path: Path) -> Path:
    """A bundle in the store, as an entry and as a folder, made a day ago."""
    store = Store(layout.root)
    folder = shutil.copytree(_bundle(tmp_path), tmp_path / "copy", dirs_exist_ok=True)
    entry = add_bundle(store, BundleFiles.open(folder))
    made = checkout(store, entry)
    for name in ("bundle", "copy", "model"):
        shutil.rmtree(tmp_path / name)
    for path in (made, layout.entry("bundle", entry.key.hex)):
        os.utime(path, (time.time() - DAY,) * 2)
    return made


def _bundle(tmp_path: Path) -> Path:
    from llmc.artifacts.bundle_writer import write_bundle

    return write_bundle(tmp_path / "bundle", manifest(), sources(tmp_path / "model"))


def test_a_bundle_folder_goes_with_its_entry(layout: Layout, tmp_path: Path) -> None:
    folder = add(layout, tmp_path)
    before = sum(path.stat().st_size for path in files_below(layout.blobs))
    found = collect(layout, max_size=0)
    assert not folder.exists()
    assert (found.entries, found.bundles, found.after) == (1, 1, 0)
    assert found.freed == found.before > before, "the blobs, once, and the rest of the folder"
    assert found.linked == 0


def test_a_folder_whose_entry_has_gone_goes_by_its_own_time(layout: Layout, tmp_path: Path) -> None:
    folder = add(layout, tmp_path)
    layout.entry("bundle", bundle_key(manifest()).hex).unlink()
    age_blobs(layout)
    assert collect(layout, max_age=2 * DAY).bundles == 0
    assert BundleFiles.open(folder).verify() == []
    os.utime(folder, (time.time() - 3 * DAY,) * 2)
    assert collect(layout, max_age=2 * DAY).bundles == 1


def test_a_folder_that_was_made_just_now_is_about_to_be_opened(layout: Layout, tmp_path: Path) -> None:
    folder = add(layout, tmp_path)
    os.utime(folder)
    assert dict(collect(layout, max_size=0).kept) == {"in use": 1}
    assert BundleFiles.open(folder).verify() == []


def test_pinning_a_bundle_keeps_its_folder(layout: Layout, tmp_path: Path) -> None:
    folder = add(layout, tmp_path)
    pin(layout, bundle_key(manifest()))
    collect(layout, max_size=0, max_age=0)
    assert BundleFiles.open(folder).verify() == []


def test_what_a_bundle_elsewhere_links_stays_on_the_disk_and_is_said(layout: Layout, tmp_path: Path) -> None:
    folder = _bundle(tmp_path)
    store = Store(layout.root)
    add_bundle(store, BundleFiles.open(folder))
    del store
    linked = manifest().size
    dry = collect(layout, max_size=0, dry_run=True)
    found = collect(layout, max_size=0)
    assert (found.linked, found.after) == (dry.linked, dry.after) == (linked, 0)
    assert found.freed == dry.freed == found.before - linked
    assert BundleFiles.open(folder).verify() == []


OPENER = """
    import sys
    from llmc.artifacts.bundle import BundleFiles
    files = BundleFiles.open(sys.argv[1])
    print("open", flush=True)
    sys.stdin.readline()
    for digest in files.manifest.blobs:
        assert files.path(digest).read_bytes() == files.read(digest)
    print("read")
"""


def test_a_bundle_open_in_another_process_can_be_read_afterwards(layout: Layout, tmp_path: Path) -> None:
    import subprocess
    import sys
    import textwrap

    folder = add(layout, tmp_path)
    command = [sys.executable, "-c", textwrap.dedent(OPENER), str(folder)]
    opener = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert opener.stdout is not None
    opener.stdout.readline()
    os.utime(folder, (0, 0))
    assert dict(collect(layout, max_size=0, max_age=0).kept) == {"in use": 1}
    assert opener.communicate("\n")[0] == "read\n"
    os.utime(folder, (0, 0))
    assert collect(layout, max_size=0).after == 0


# Remains


def test_remains_of_the_dead_go_and_those_of_the_living_stay(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.artifacts.workspace import Area, workspace

    area = Area(layout.root)
    with workspace(area, lambda error: area) as living, area.blobs.writer() as stream:
        stream.write(b"x")
        dead = layout.temporaries / ("d" * 24)
        dead.mkdir()
        (dead / "partial").write_bytes(b"p" * 500)
        (layout.temporaries / "files-of-another-kind").write_bytes(b"f")
        assert collect(layout).others == 0, "it might have been made this moment"
        monkeypatch.setattr(module, "clock", lambda _: time.time() + 100)
        found = collect(layout)
        assert (found.others, found.freed) == (1, 500)
        assert living.folder.is_dir()
        monkeypatch.setattr(module, "clock", lambda _: time.time() + 4 * DAY)
        assert not collect(layout).failed
        assert not (layout.temporaries / "files-of-another-kind").exists()


def test_quarantine_goes_after_a_week_or_for_want_of_room(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(layout, 1)
    for name in ("a", "b"):
        layout.quarantine.mkdir(exist_ok=True)
        (layout.quarantine / name).write_bytes(b"bad" * 1000)
        assert collect(layout).others == 0
    assert collect(layout, max_size=own_size(layout) + 100).others == 2
    assert kept(layout) == [1], "before anything that is good"
    (layout.quarantine / "c").write_bytes(b"bad")
    monkeypatch.setattr(module, "clock", lambda _: time.time() + 8 * DAY)
    assert collect(layout).others == 1


def test_locks_of_keys_that_are_not_there_go_unless_held(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.artifacts.locks import exclusive

    fill(layout, 1)
    for number in (1, 2, 3):
        layout.lock("k", key(number).hex).touch()
    monkeypatch.setattr(module, "clock", lambda _: time.time() + 100)
    with exclusive(layout.lock("k", key(3).hex)):
        collect(layout)
    left = {path.name for path in layout.locks.iterdir()}
    assert left == {"collect", f"k-{key(1).hex}", f"k-{key(3).hex}"}


def test_what_dead_writers_left_beside_bundles_goes(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(layout, 1)
    (layout.bundles / ".0123456789abcdef.0000000000000000.new").mkdir(parents=True)
    old = layout.bundles / ".0123456789abcdef.1111111111111111.old"
    old.mkdir()
    monkeypatch.setattr(module, "clock", lambda _: time.time() + 100)
    assert collect(layout).others == 1
    assert old.exists(), "it is put back when the bundle is opened"


# Time


def test_times_in_the_future_neither_block_nor_reorder(layout: Layout) -> None:
    fill(layout, 1, 2, 3)
    for number in (1, 2, 3):
        use(layout, number, time.time() + (10 - number) * 365 * DAY)
    age_blobs(layout, -365 * DAY)
    Store(layout.root)
    collect(layout, max_size=2 * own_size(layout) + SIZE // 2)
    assert kept(layout) == [1, 2], "3 was used before the others"
    used = {int(entry.key.components["number"] or 0): entry.used for entry in Store(layout.root).entries()}
    assert time.time() - 60 < used[2] < used[1] <= time.time() + 1, "from now on they age"
    assert collect(layout, max_size=0).after == 0


def test_an_unnamed_blob_of_the_future_goes(layout: Layout) -> None:
    Store(layout.root).put_bytes(b"garbage")
    age_blobs(layout, -10 * DAY)
    assert collect(layout).blobs == 1


def test_now_is_what_the_file_system_says(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(layout, 1)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert collect(layout, max_age=12 * 3600).entries == 1


# Without locks


def test_where_locks_may_not_reach_what_is_new_stays(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(layout, 1, 2)
    use(layout, 2, time.time())
    monkeypatch.setattr("llmc.artifacts.gate._file_system", lambda _: "nfs4")
    found = collect(layout, max_size=0)
    assert kept(layout) == [2]
    assert dict(found.kept) == {"used within the grace period": 1}
    assert (found.blobs, found.waiting) == (0, SIZE), "a writer may have found it there a moment ago"
    age_blobs(layout)
    assert collect(layout, max_size=0).blobs == 1


def test_a_kernel_that_grants_every_lock_is_found_out(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.artifacts.gate import gate, keeps_all_out

    fill(layout, 1)
    with gate(layout, exclusive=True):
        assert keeps_all_out(layout)
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    with gate(layout, exclusive=True):
        assert not keeps_all_out(layout)
    assert collect(layout, max_size=0).blobs == 0


def test_nobody_waits_for_ever_at_the_gate(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.artifacts.gate import gate

    fill(layout, 1)
    monkeypatch.setattr("llmc.artifacts.gate.GATE_SECONDS", 0.05)
    with gate(layout, exclusive=True):
        fill(layout, 2)
    with gate(layout):
        assert collect(layout, max_age=0, grace=0).entries == 2


# Stores that cannot be written, in part or at all


def test_a_dry_run_says_the_same_and_removes_nothing(layout: Layout, tmp_path: Path) -> None:
    fill(layout, 1, 2, 3, shared=b"shared" * 100)
    add(layout, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in files_below(layout.root)}
    dry = collect(layout, max_size=own_size(layout), dry_run=True)
    assert {path: path.stat().st_mtime_ns for path in files_below(layout.root)} == before
    assert dry.entries == 3 or dry.entries == 4
    assert collect(layout, max_size=own_size(layout)) == dry._replace(dry_run=False)


def test_a_store_that_does_not_exist_is_empty_and_stays_so(layout: Layout) -> None:
    assert collect(layout, max_size=0) == Collection(0, 0, 0, 0, 0, 0, 0, 0, {}, 0, 0, {}, dry_run=False)
    assert not layout.root.exists()


def test_what_cannot_be_removed_is_reported(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(layout, 1, 2)
    foreign = {layout.entry("k", key(1).hex), layout.blob(Store(layout.root).put_bytes(content(2)).digest)}
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if source in foreign:
            raise PermissionError(1, "Operation not permitted")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    found = collect(layout, max_size=0)
    assert kept(layout) == [1]
    assert set(found.failed) == set(map(str, foreign))
    assert dict(found.kept) == {"cannot be removed": 1}
    assert found.entries == 1


READ_ONLY = """
    import sys
    from llmc.artifacts.collect import collect
    from llmc.artifacts.layout import Layout
    from llmc.artifacts.publish import UnwritableError
    layout = Layout(sys.argv[1])
    try:
        collect(layout, max_size=0)
    except UnwritableError as error:
        print(error)
    assert collect(layout, max_size=0, dry_run=True).entries == 1
"""


def test_a_read_only_store_is_one_clear_error(mounts: None, layout: Layout) -> None:
    fill(layout, 1)
    prefix = mounted(f"mount --bind {layout.root} {layout.root}; mount -o remount,bind,ro {layout.root}")
    said = finish(child(READ_ONLY, layout.root, before=prefix))
    assert "Read-only file system" in said
    assert said.count("\n") == 0
    assert kept(layout) == [1]


def test_a_file_in_the_place_of_a_folder_is_an_error(layout: Layout) -> None:
    fill(layout, 1)
    shutil.rmtree(layout.temporaries)
    layout.temporaries.write_text("x")
    with pytest.raises(UnwritableError):
        collect(layout)


def test_shared_stores_are_not_touched(layout: Layout, tmp_path: Path) -> None:
    fill(Layout(tmp_path / "shared"), 1)
    store = Store(layout.root, shared=[tmp_path / "shared"])
    assert store.lookup(key(1)) is not None
    collect(store.layout, max_size=0)
    assert kept(Layout(tmp_path / "shared")) == [1]


def test_many_things_go_in_rounds(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH", 3)
    fill(layout, *range(1, 9))
    seen: list[tuple[int, int]] = []
    found = collect(
        layout, max_size=2 * own_size(layout) + SIZE // 2, progress=lambda done, total: seen.append((done, total))
    )
    assert kept(layout) == [7, 8]
    assert (found.entries, found.blobs) == (6, 6)
    assert seen[-1][0] == seen[-1][1] == 12


def test_a_blob_that_is_stored_again_keeps_its_stamp(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storing it again neither touches nor copies it, so that the next start does not hash gigabytes."""
    from llmc.artifacts import blobs

    fill(layout, 1)
    age_blobs(layout)
    time.sleep(0.03)
    monkeypatch.setattr(blobs, "SAVE_STAMPS_FROM", 1)
    store = Store(layout.root)
    blob = store.put_bytes(content(1))
    store.path(blob)
    store.put_bytes(content(1))
    monkeypatch.setattr(blobs, "digest_file", lambda path: pytest.fail(f"{path} was hashed"))
    assert Store(layout.root).path(blob).read_bytes() == content(1)
