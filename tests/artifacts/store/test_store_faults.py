"""Disks that are full, read-only or failing: nothing is half published, and a compile still ends well."""

from __future__ import annotations

import errno
import gc
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from llmc.artifacts.atomic_write import UnwritableError
from llmc.artifacts.digest import Blob
from llmc.artifacts.store.blobs import Blobs
from llmc.artifacts.store.store import Store
from llmc.artifacts.store.workspace import Workspace
from llmc.errors import ArtifactError, CapacityError
from tests.artifacts.helpers import Faults, child, files_below, finish, key, mounted

DATA = b"x" * 10_000


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch, store: Store) -> Faults:
    return Faults(monkeypatch, store.root)


def build(space: Workspace) -> Mapping[str, Blob]:
    path = space.folder / "graph"
    path.write_bytes(DATA)
    space.meta["seconds"] = 2
    return {"graph": space.put_file(path), "notes": space.put_bytes(b"notes")}


PUTS = {
    "put_bytes": lambda store, path: store.put_bytes(DATA),
    "put_file": lambda store, path: store.put_file(path),
    "put_file, moved": lambda store, path: store.put_file(path, move=True),
    "writer": lambda store, path: _stream(store),
    "publish": lambda store, path: store.publish(key(), {}),
}


def _stream(store: Store) -> None:
    with store.writer() as stream:
        stream.write(DATA)


FULL = [
    ("write", errno.ENOSPC),
    ("write", errno.EDQUOT),
    ("write", errno.EIO),
    ("write", errno.EFBIG),
    ("fsync", errno.EIO),
    ("rename", errno.ENOSPC),
    ("open", errno.ENOSPC),
    ("mkdir", errno.EDQUOT),
]


@pytest.mark.parametrize(
    ("put", "call", "code"),
    [
        (put, call, code)
        for put in PUTS
        for call, code in FULL
        if put != "put_file, moved" or call not in ("write", "open")  # it needs neither
    ],
)
def test_a_full_disk_is_a_capacity_error_and_leaves_nothing(
    store: Store, faults: Faults, tmp_path: Path, put: str, call: str, code: int
) -> None:
    source = tmp_path / "source"
    source.write_bytes(DATA)
    faults.inject(call, code)
    with pytest.raises(CapacityError) as caught:
        PUTS[put](store, source)
    assert str(store.root) in str(caught.value)
    needed = f"{len(DATA)} bytes" if put.startswith("put_") else "bytes"
    assert f"{needed} were needed" in str(caught.value)
    assert "--cache-dir" in str(caught.value)
    assert [path for path in files_below(store.root) if path.parent.name not in ("locks", "leases")] == []
    assert source.read_bytes() == DATA


@pytest.mark.parametrize("after", range(4))
def test_whichever_fsync_fails_nothing_is_published(store: Store, faults: Faults, after: int) -> None:
    (store.root / "v1/tmp").mkdir(parents=True)
    faults.inject("fsync", errno.EIO, after=after)
    with pytest.raises(CapacityError):
        store.put_bytes(DATA)
    assert files_below(store.root) == []


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_store_that_cannot_be_written_says_so(store: Store, faults: Faults, code: int) -> None:
    faults.inject("open", code)
    with pytest.raises(UnwritableError, match="cannot be written"):
        store.put_bytes(DATA)
    assert issubclass(UnwritableError, ArtifactError)


def test_a_file_in_the_place_of_the_store_says_so(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("x")
    with pytest.raises(UnwritableError, match="Not a directory"):
        Store(tmp_path / "store").put_bytes(DATA)
    assert Store(tmp_path / "store").lookup(key()) is None


FAULTS = [
    ("write", errno.ENOSPC),
    ("fsync", errno.EIO),
    ("rename", errno.EROFS),
    ("mkdir", errno.EROFS),
    ("open", errno.EFBIG),
]


@pytest.mark.parametrize(("call", "code"), FAULTS)
def test_a_compile_ends_well_without_its_cache_and_says_so(
    store: Store, faults: Faults, caplog: pytest.LogCaptureFixture, call: str, code: int
) -> None:
    with caplog.at_level(logging.WARNING, "llmc.artifacts"):
        faults.inject(call, code)
        entry, hit = store.get_or_build(key(), build)
    assert not hit
    assert "not cached" in caplog.text
    assert store.path(entry.outputs["graph"]).read_bytes() == DATA
    assert store.get_bytes(entry.outputs["notes"].digest) == b"notes"
    again, hit = store.get_or_build(key(), build)
    assert (again.outputs, hit) == (entry.outputs, True), "known to this object"
    assert Store(store.root).lookup(key()) is None, "and to no other one"
    assert files_below(store.root / "v1/tmp") == []


@pytest.mark.parametrize("after", range(12))
@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_disk_that_fills_up_midway_never_breaks_a_compile(
    store: Store, faults: Faults, call: str, after: int
) -> None:
    faults.inject(call, errno.ENOSPC, after=after)
    entry, _ = store.get_or_build(key(), build)
    assert store.path(entry.outputs["graph"]).read_bytes() == DATA
    assert entry.meta == {"seconds": 2}
    published = Store(store.root).lookup(key(), verify=True)
    assert published is None or published.outputs == entry.outputs
    assert files_below(store.root / "v1/tmp") == []


def test_a_build_that_finds_its_folder_full_runs_again_where_there_is_room(store: Store) -> None:
    folders: list[Path] = []

    def build_in_full_folder(space: Workspace) -> Mapping[str, Blob]:
        folders.append(space.folder)
        if store.root in space.folder.parents:
            raise OSError(errno.ENOSPC, "the compiler's own file did not fit")
        return build(space)

    entry, _ = store.get_or_build(key(), build_in_full_folder)
    assert len(folders) == 2
    assert store.path(entry.outputs["graph"]).read_bytes() == DATA


def test_a_build_is_not_run_again_for_errors_of_its_own(store: Store) -> None:
    runs: list[int] = []

    def fail(space: Workspace) -> Mapping[str, Blob]:
        runs.append(1)
        raise PermissionError(errno.EACCES, "a checkpoint of someone else")

    with pytest.raises(PermissionError):
        store.get_or_build(key(), fail)
    assert len(runs) == 1


def test_no_room_anywhere_is_a_capacity_error(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Faults(monkeypatch, tmp_path).inject("open", errno.ENOSPC)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(CapacityError):
        store.get_or_build(key(), build)
    monkeypatch.undo()
    assert store.entries() == []
    assert [file for file in files_below(tmp_path) if file.parent.name == "tmp"] == []


def test_no_temporary_folder_is_a_capacity_error(store: Store, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.inject("write", errno.ENOSPC)
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    with pytest.raises(CapacityError, match="temporary folder"):
        store.get_or_build(key(), build)


def test_uncached_results_are_gone_when_the_store_is(store: Store, faults: Faults) -> None:
    faults.inject("write", errno.ENOSPC)
    entry, _ = store.get_or_build(key(), build)
    path = store.path(entry.outputs["notes"])
    assert store.root not in path.parents
    other = Store(store.root)
    entry, _ = other.get_or_build(key(), build)
    other_path = other.path(entry.outputs["notes"])
    assert other_path != path
    del other
    gc.collect()
    assert not other_path.exists()
    assert path.exists()


def test_workers_share_a_named_overflow(store: Store, faults: Faults, tmp_path: Path) -> None:
    faults.inject("write", errno.ENOSPC)
    worker = Store(store.root, overflow=tmp_path / "overflow")
    entry, _ = worker.get_or_build(key(), build)
    del worker
    parent = Store(store.root, overflow=tmp_path / "overflow")
    found, hit = parent.get_or_build(key(), build)
    assert (found.outputs, hit) == (entry.outputs, True)
    assert parent.path(entry.outputs["graph"]).read_bytes() == DATA


def test_a_damaged_store_that_cannot_be_written_is_healed_beside_it(store: Store, faults: Faults) -> None:
    entry, _ = store.get_or_build(key(), build)
    blob = store.path(entry.outputs["graph"])
    blob.chmod(0o644)
    blob.write_bytes(b"y" * len(DATA))
    faults.inject("open", errno.EROFS)
    faults.inject("rename", errno.EROFS)
    faults.inject("mkdir", errno.EROFS)
    other = Store(store.root)
    entry, hit = other.get_or_build(key(), build)
    assert not hit
    assert other.path(entry.outputs["graph"]).read_bytes() == DATA


# The same by the kernel

SCRIPT = """
    import sys, resource, logging
    from llmc.artifacts.store.store import Store
    from llmc.artifacts.key import Key
    from llmc.errors import CapacityError
    from pathlib import Path
    root, limit = Path(sys.argv[1]), int(sys.argv[2])
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    store = Store(root)
    try:
        store.put_bytes(b"x" * 200_000)
    except CapacityError as error:
        assert "200000 bytes were needed" in str(error), error
    else:
        raise SystemExit("it did fit")
    left = [str(path) for path in root.rglob("*") if path.is_file()]
    assert not left, left
    blob = store.put_bytes(b"small")
    assert store.get_bytes(blob.digest) == b"small"
    try:
        build = lambda space: {"a": space.put_bytes(b"y" * 200_000)}
        entry, hit = store.get_or_build(Key("k", {"a": 1}), build)
    except CapacityError:
        print("no room")
    else:
        assert store.path(entry.outputs["a"]).stat().st_size == 200_000
        print("uncached")
"""


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    assert finish(child(SCRIPT, tmp_path / "store", 50_000)) == "no room"


@pytest.mark.full
def test_a_full_file_system(mounts: None, tmp_path: Path) -> None:
    command = f"mount -t tmpfs -o size=96k tmpfs {tmp_path}"
    assert finish(child(SCRIPT, tmp_path / "store", 0, before=mounted(command))) == "uncached"


READ_ONLY = """
    import sys
    from llmc.artifacts.store.store import Store
    from llmc.artifacts.key import Key
    from llmc.artifacts.atomic_write import UnwritableError
    store = Store(sys.argv[1])
    def build(space):
        return {"a": space.put_bytes(b"built")}
    entry, hit = store.get_or_build(Key("k", {"a": 1}), None)
    assert hit and store.path(entry.outputs["a"]).read_bytes() == b"stored"
    assert store.verify().bad == []
    entry, hit = store.get_or_build(Key("k", {"a": 2}), build)
    assert not hit and store.path(entry.outputs["a"]).read_bytes() == b"built"
    try:
        store.put_bytes(b"more")
    except UnwritableError as error:
        print(error)
"""


@pytest.mark.full
def test_a_read_only_store_serves_reads(mounts: None, store: Store) -> None:
    from llmc.artifacts.key import Key

    store.get_or_build(Key("k", {"a": 1}), lambda space: {"a": space.put_bytes(b"stored")})
    before = {path: path.stat().st_mtime_ns for path in files_below(store.root)}
    command = f"mount --bind {store.root} {store.root} && mount -o remount,ro,bind {store.root}"
    assert "Read-only file system" in finish(child(READ_ONLY, store.root, before=mounted(command)))
    assert {path: path.stat().st_mtime_ns for path in files_below(store.root)} == before


def test_blobs_are_never_written_in_place(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reader has mapped stays as it is while the blob is healed under the same name."""
    blob = store.put_bytes(DATA)
    with store.path(blob).open("rb") as reader:
        path = store.path(blob)
        path.unlink()
        Blobs(store._main.layout).put_bytes(DATA)
        assert os.fstat(reader.fileno()).st_ino != path.stat().st_ino
        assert reader.read() == DATA
