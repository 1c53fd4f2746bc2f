"""Shared stores that are only read: used where they are, and left exactly as they are."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from llmc.artifacts.digest import Blob
from llmc.artifacts.key import Key
from llmc.artifacts.local.opening import open_store
from llmc.artifacts.store.entries import Entry
from llmc.artifacts.store.store import Store
from llmc.artifacts.store.workspace import Workspace
from llmc.settings import Settings
from tests.artifacts.helpers import child, files_below, finish, flip, key, mounted, truncate
from tests.timing import until


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    return tmp_path / "mount"


@pytest.fixture
def entry(mount: Path) -> Entry:
    """What someone put into the shared store."""
    store = Store(mount)
    return store.publish(key(), {"graph": store.put_bytes(b"graph" * 1000)}, {"n": 1})


def local(tmp_path: Path, *shared: Path) -> Store:
    return Store(tmp_path / "local", shared=shared)


def never(space: Workspace) -> Mapping[str, Blob]:
    raise AssertionError("built, although it is shared")


def own(space: Workspace) -> Mapping[str, Blob]:
    return {"graph": space.put_bytes(b"own")}


def picture(folder: Path) -> dict[str, tuple[object, ...]]:
    """Everything about a folder's files that a reader could change."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found[str(path)] = (status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return found


def test_what_is_shared_is_used_in_place(tmp_path: Path, mount: Path, entry: Entry) -> None:
    before = picture(mount)
    store = local(tmp_path, mount)
    found, hit = store.get_or_build(entry.key, never)
    assert hit and (found.outputs, found.created) == (entry.outputs, entry.created)
    assert store.path(found.outputs["graph"]).is_relative_to(mount)
    assert store.get_bytes(found.outputs["graph"].digest) == b"graph" * 1000
    assert store.has(found.outputs["graph"])
    assert store.lookup(entry.key, verify=True) is not None
    assert files_below(store.layout.base / "blobs") == files_below(store.layout.entries) == []
    assert picture(mount) == before


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_damage_there_is_a_miss_and_stays_there(
    tmp_path: Path, mount: Path, entry: Entry, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    damage(Store(mount).path(entry.outputs["graph"]))  # type: ignore[operator]
    before = picture(mount)
    store = local(tmp_path, mount)
    found, hit = store.get_or_build(entry.key, own)
    assert not hit
    assert store.get_bytes(found.outputs["graph"].digest) == b"own"
    assert local(tmp_path, mount).get_or_build(entry.key, never)[0].outputs == found.outputs
    assert picture(mount) == before
    assert files_below(store.layout.quarantine) == []


@pytest.mark.parametrize("damage", [flip, truncate])
def test_a_damaged_entry_there_is_a_miss_and_stays_there(
    tmp_path: Path, mount: Path, entry: Entry, damage: object
) -> None:
    damage(Store(mount).layout.entry(entry.key.kind, entry.key.hex))  # type: ignore[operator]
    before = picture(mount)
    assert local(tmp_path, mount).get_or_build(entry.key, own)[1] is False
    assert picture(mount) == before


def test_a_digest_is_computed_once_and_remembered_here(
    tmp_path: Path, mount: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(mount)
    big = store.publish(key(), {"weights": store.put_bytes(b"w" * (9 << 20))})
    old = 1_000_000_000
    path = store.path(big.outputs["weights"], verify=False)
    os.utime(path, (old, old))
    until(lambda: _settled(path))
    hashed: list[Path] = []
    from llmc.artifacts.store import blobs

    original = blobs.digest_file
    monkeypatch.setattr(blobs, "digest_file", lambda path: hashed.append(path) or original(path))  # type: ignore[func-returns-value]
    for _ in range(2):
        assert local(tmp_path, mount).get_or_build(big.key, never)[1]
    assert len(hashed) == 1
    assert not (mount / "v1/.stamps.json").exists()
    flip(path)
    assert local(tmp_path, mount).get_or_build(big.key, own)[1] is False


def _settled(path: Path) -> bool:
    from llmc.artifacts.verified_files import settled, signature

    return settled(signature(path.stat()))


def test_a_mount_that_is_gone_is_a_miss(tmp_path: Path, mount: Path, entry: Entry) -> None:
    shutil.rmtree(mount)
    store = local(tmp_path, mount)
    assert store.get_or_build(entry.key, own)[1] is False
    assert not mount.exists()
    mount.write_text("not even a folder")
    assert store.get_or_build(key(other=1), own)[1] is False


def test_a_mount_that_goes_away_between_is_a_miss(tmp_path: Path, mount: Path, entry: Entry) -> None:
    store = local(tmp_path, mount)
    assert store.lookup(entry.key) is not None
    shutil.rmtree(mount)
    assert store.get_or_build(entry.key, own)[1] is False


def test_several_are_requested_in_order_and_complete_each_other(tmp_path: Path, mount: Path, entry: Entry) -> None:
    second = Store(tmp_path / "second")
    second.publish(entry.key, {"graph": second.put_bytes(b"second")})
    other = second.publish(key(n=2), {"graph": second.put_bytes(b"only here")})
    store = local(tmp_path, mount, second.root)
    assert store.get_or_build(entry.key, never)[0].outputs == entry.outputs
    assert store.get_or_build(other.key, never)[1]
    flip(Store(mount).path(entry.outputs["graph"]))
    assert local(tmp_path, mount, second.root).get_or_build(entry.key, never)[0].outputs["graph"].size == 6


def test_what_is_here_comes_first(tmp_path: Path, mount: Path, entry: Entry) -> None:
    mine = Store(tmp_path / "local")
    mine.publish(entry.key, {"graph": mine.put_bytes(b"mine")})
    assert local(tmp_path, mount).get_or_build(entry.key, never)[0].outputs["graph"].size == 4


def test_results_of_one_machine_are_not_taken_from_another(tmp_path: Path, mount: Path) -> None:
    shared = Store(mount)
    theirs = shared.publish(Key("local-digests", {"file": "/x"}), {"graph": shared.put_bytes(b"theirs")})
    assert local(tmp_path, mount).get_or_build(theirs.key, own)[1] is False


def test_workers_take_the_shared_stores_along(tmp_path: Path, mount: Path, entry: Entry) -> None:
    store = pickle.loads(pickle.dumps(local(tmp_path, mount)))
    assert store.get_or_build(entry.key, never)[1]


def test_the_environment_names_them(tmp_path: Path, mount: Path, entry: Entry) -> None:
    environment = {"LLMC_SHARED_CACHE": os.pathsep.join([str(tmp_path / "gone"), str(mount)])}
    store = open_store(tmp_path / "local", Settings.from_environment(environment))
    assert store.get_or_build(entry.key, never)[1]


@pytest.mark.full
def test_a_mount_that_is_read_only_serves(tmp_path: Path, mount: Path, entry: Entry, mounts: None) -> None:
    script = """
        import sys
        from llmc.artifacts.key import Key
        from llmc.artifacts.store.store import Store
        store = Store(sys.argv[1], shared=[sys.argv[2]])
        (entry,) = Store(sys.argv[2]).entries()
        try:
            open(sys.argv[2] + "/probe", "w")
        except OSError as error:
            print(error.strerror)
        print(store.get_or_build(entry.key, None)[1], store.path(entry.outputs["graph"]).parts[-6:-5])
    """
    before = mounted(f"mount --bind -o ro {mount} {mount} && mount -o remount,bind,ro {mount}")
    done = finish(child(script, tmp_path / "local", mount, before=before))
    assert done.splitlines() == ["Read-only file system", f"True ('{mount.name}',)"]


def test_no_warning_is_logged_for_what_is_sound(
    tmp_path: Path, mount: Path, entry: Entry, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        local(tmp_path, mount).get_or_build(entry.key, never)
    assert caplog.records == []


def test_an_entry_whose_outputs_are_shared_is_sound(tmp_path: Path, mount: Path, entry: Entry) -> None:
    """A bundle's entry in the local store names executables that the compile found in the shared store."""
    store = local(tmp_path, mount)
    bundle = store.publish(key("bundle"), entry.outputs)
    assert store.verify().bad == []
    assert store.lookup(bundle.key) is not None
    truncate(Store(mount).path(entry.outputs["graph"]))
    assert [bad.name for bad in store.verify().bad] == [f"bundle/{bundle.key.short}"]
