"""Faults from the kernel itself: /dev/full, limits on the size of files, a small file system, EIO (P14).

Wherever the room ends, the build ends well or with CapacityError, and nothing is half published.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from llmc.artifacts import atomic_write
from llmc.artifacts.digest import Blob
from llmc.artifacts.store.blobs import BlobMissingError
from llmc.artifacts.store.store import Store
from llmc.artifacts.store.workspace import Workspace
from llmc.errors import CapacityError
from tests.artifacts.helpers import Faults, child, files_below, finish, key, mounted

SCRIPT = """
    import json, logging, os, resource, shutil, sys, tempfile
    from pathlib import Path
    import filelock
    from llmc.artifacts.store.store import Store
    from llmc.errors import CapacityError
    from tests.artifacts.faults.kills import CONTENTS, build, forked, heals, start
    from tests.artifacts.helpers import key
    root, size = Path(sys.argv[1]), sum(map(len, CONTENTS.values()))
    ends = {"built": 0, "no room": 0}
    def attempt(limit, out):
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        store = Store(root)
        try:
            entry, hit = store.get_or_build(key(), build)
        except CapacityError:
            os.write(out, b"n")
        else:
            for name, content in CONTENTS.items():
                assert store.get_bytes(entry.outputs[name].digest) == content
            os.write(out, b"b")
    def limited(limit):
        read, write = os.pipe()
        if forked(lambda: attempt(limit, write)):
            raise SystemExit(f"failed at {limit}")
        ends["built" if os.read(read, 1) == b"b" else "no room"] += 1
"""
LIMITS = """
    for limit in [0, 1, 100, 500, *range(1000, 25_000, 2000)]:
        root = root.with_name(f"store {limit}")
        start(root)
        limited(limit)
        if forked(lambda: heals(root)):
            raise SystemExit(f"wedged after {limit}")
    print(json.dumps(ends))
"""
FILLED = """
    start(root)
    free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
    for room in range(0, 2 * size, 4096):
        filler = root.parent / "filler"
        filler.write_bytes(bytes(free - room))
        limited(None)
        filler.unlink()
        if forked(lambda: heals(root)):
            raise SystemExit(f"wedged with {room} bytes left")
        shutil.rmtree(root)
        start(root)
    print(json.dumps(ends))
"""


def test_a_limit_on_files_at_any_size_breaks_nothing(tmp_path: Path) -> None:
    ends = finish(child(SCRIPT + LIMITS, tmp_path / "store"))
    assert '"built": 0' not in ends
    assert '"no room": 0' not in ends


@pytest.mark.full
def test_a_file_system_that_is_full_at_any_point_breaks_nothing(mounts: None, tmp_path: Path) -> None:
    command = f"mount -t tmpfs -o size=512k tmpfs {tmp_path}"
    ends = finish(child(SCRIPT + FILLED, tmp_path / "store", before=mounted(command)))
    assert '"no room": 0' in ends, "what the store has no room for goes elsewhere"


def build(space: Workspace) -> dict[str, Blob]:
    return {"graph": space.put_bytes(b"graph" * 1000)}


def test_dev_full_in_the_place_of_every_new_file(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel refuses each write; nothing but the name that is opened is changed."""
    real = os.open
    with monkeypatch.context() as patch:
        below = str(store.root)
        patch.setattr(
            atomic_write.os,
            "open",
            lambda path, flags, mode=0o777, **more: (
                real("/dev/full", os.O_WRONLY)
                if str(path).startswith(below) and flags & os.O_EXCL
                else real(path, flags, mode, **more)
            ),
        )
        with pytest.raises(CapacityError, match="No space left on device"):
            store.put_bytes(b"x")
        entry, _ = store.get_or_build(key(), build)
        assert store.get_bytes(entry.outputs["graph"].digest) == b"graph" * 1000
    assert "not cached" in caplog.text
    assert Store(store.root).lookup(key()) is None
    assert not Store(store.root).get_or_build(key(), build)[1]
    assert Store(store.root).get_or_build(key(), build)[1]


@pytest.mark.parametrize("call", ["fsync", "write", "rename", "open", "link", "mkdir", "fchmod"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES])
def test_every_call_may_fail_and_the_next_process_is_not_troubled(
    store: Store, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    for after in range(12):
        with monkeypatch.context() as patch:
            Faults(patch, store.root).inject(call, code, after=after)
            faulty = Store(store.root)
            entry, _ = faulty.get_or_build(key(batch=after), build)
            assert faulty.get_bytes(entry.outputs["graph"].digest) == b"graph" * 1000
        Store(store.root).get_or_build(key(batch=after), build)
        assert Store(store.root).get_or_build(key(batch=after), build)[1]
    assert files_below(store.layout.temporaries) == []
    assert store.verify().bad == []


def test_a_disk_that_fails_when_read_is_a_miss_that_heals(store: Store) -> None:
    """/proc/self/mem is a regular file that answers each read at its start with EIO."""
    store.get_or_build(key(), build)
    for path in (store.layout.entry(key().kind, key().hex), *files_below(store.layout.blobs)):
        path.unlink()
        path.symlink_to("/proc/self/mem")
        assert Store(store.root).lookup(key(), verify=True) is None
        assert not Store(store.root).get_or_build(key(), build)[1]
        assert Store(store.root).get_or_build(key(), build)[1]


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.ENOMEM, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("what", ["entries", "blobs"])
def test_what_cannot_be_read_just_now_is_a_miss_and_stays_where_it_is(
    store: Store, monkeypatch: pytest.MonkeyPatch, what: str, code: int
) -> None:
    """A process out of descriptors, or a network that is away for a moment, says nothing about the content."""
    blob = store.get_or_build(key(), build)[0].outputs["graph"]
    before = {path: path.stat().st_ino for path in files_below(store.layout.base / what)}
    real = os.open

    def fail(path: object, flags: int, mode: int = 0o777, **named: int) -> int:
        if str(path).startswith(str(store.layout.base / what)) and not flags & (os.O_CREAT | os.O_DIRECTORY):
            raise OSError(code, os.strerror(code))
        return real(path, flags, mode, **named)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        faulty = Store(store.root)
        assert faulty.lookup(key(), verify=True) is None
        assert faulty.counters["corrupt"] == 0
        if what == "blobs":
            with pytest.raises(BlobMissingError):
                faulty.get_bytes(blob.digest)
    assert {path: path.stat().st_ino for path in files_below(store.layout.base / what)} == before
    assert files_below(store.layout.quarantine) == []
    assert Store(store.root).get_or_build(key(), build)[1], "it is a hit again"
