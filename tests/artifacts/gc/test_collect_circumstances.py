"""Trimming a store among remains of the dead, wrong clocks, locks that do nothing, and disks that refuse."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from llmc.artifacts import gc as module
from llmc.artifacts.atomic_write import UnwritableError
from llmc.artifacts.gc import Collection, collect
from llmc.artifacts.store.layout import Layout
from llmc.artifacts.store.store import Store
from tests.artifacts.gc.collecting import DAY, SIZE, add, age_blobs, content, fill, kept, key, own_size, use
from tests.artifacts.helpers import child, files_below, finish, mounted

# Remains


def test_remains_of_the_dead_go_and_those_of_the_living_stay(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.artifacts.store.workspace import Area, workspace

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
    from llmc.artifacts.store.locks import exclusive

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
    monkeypatch.setattr("llmc.artifacts.store.locks._file_system", lambda _: "nfs4")
    found = collect(layout, max_size=0)
    assert kept(layout) == [2]
    assert dict(found.kept) == {"used within the grace period": 1}
    assert (found.blobs, found.waiting) == (0, SIZE), "a writer may have found it there a moment ago"
    age_blobs(layout)
    assert collect(layout, max_size=0).blobs == 1


def test_a_kernel_that_grants_every_lock_is_found_out(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.artifacts.store.locks import keeps_all_out, publish_lock

    fill(layout, 1)
    with publish_lock(layout, exclusive=True):
        assert keeps_all_out(layout)
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    with publish_lock(layout, exclusive=True):
        assert not keeps_all_out(layout)
    assert collect(layout, max_size=0).blobs == 0


def test_nobody_waits_for_ever_at_the_gate(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.artifacts.store.locks import publish_lock

    fill(layout, 1)
    monkeypatch.setattr("llmc.artifacts.store.locks.GATE_SECONDS", 0.05)
    with publish_lock(layout, exclusive=True):
        fill(layout, 2)
    with publish_lock(layout):
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
    from llmc.artifacts.gc import collect
    from llmc.artifacts.store.layout import Layout
    from llmc.artifacts.atomic_write import UnwritableError
    layout = Layout(sys.argv[1])
    try:
        collect(layout, max_size=0)
    except UnwritableError as error:
        print(error)
    assert collect(layout, max_size=0, dry_run=True).entries == 1
"""


@pytest.mark.full
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
    from llmc.artifacts.store import blobs

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
