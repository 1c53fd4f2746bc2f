"""Leases: what a living process uses is known, and what a dead one used is not."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.writer import write_bundle
from llmc.artifacts.store import leases
from llmc.artifacts.store.layout import Layout
from llmc.artifacts.store.leases import Lease, blob_name, bundle_name, entry_name, in_use
from llmc.artifacts.store.store import Store
from tests.artifacts.helpers import child, files_below, key, manifest, sources

ONE, OTHER = f"entries/k/{'1' * 64}", f"blobs/{'2' * 64}"
HOUR = 3600.0


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that grants every lock, as NFS without its lock service does."""
    monkeypatch.setattr("fcntl.flock", lambda *_: None)


def the_file(layout: Layout) -> Path:
    (path,) = files_below(layout.leases)
    return path


def test_what_is_held_is_in_use_until_it_is_released(layout: Layout) -> None:
    lease = Lease(layout)
    assert in_use(layout) == set()
    assert not layout.base.exists(), "made when it is needed"
    assert lease.hold(ONE)
    assert lease.hold(ONE, OTHER)
    assert not lease.hold(ONE)
    assert in_use(layout) == {ONE, OTHER}
    lease.release()
    assert in_use(layout) == set()
    assert files_below(layout.leases) == []


def test_a_lease_ends_with_its_object(layout: Layout) -> None:
    lease = Lease(layout)
    lease.hold(ONE)
    del lease
    assert in_use(layout) == set()
    assert files_below(layout.leases) == []


def test_everything_a_store_hands_out_is_in_use(tmp_path: Path) -> None:
    writer = Store(tmp_path / "store")
    entry = writer.publish(key(), {"graph": writer.put_bytes(b"graph")})
    graph = blob_name(entry.outputs["graph"].digest)
    assert in_use(writer.layout) == {entry_name(key()), graph}
    del writer
    reader = Store(tmp_path / "store")
    assert in_use(reader.layout) == set()
    assert reader.lookup(key()) is not None
    assert in_use(reader.layout) == {entry_name(key()), graph}
    reader.path(entry.outputs["graph"])
    assert in_use(reader.layout) == {entry_name(key()), graph}


def test_what_a_build_has_stored_is_in_use_before_it_is_published(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    seen: list[set[str]] = []

    def build(space):  # type: ignore[no-untyped-def]
        blob = space.put_bytes(b"weights")
        seen.append(in_use(store.layout) & {blob_name(blob.digest)})
        return {"weights": blob}

    store.get_or_build(key(), build)
    assert len(seen[0]) == 1


def test_an_open_bundle_of_the_store_is_in_use_until_it_is_closed(layout: Layout, tmp_path: Path) -> None:
    folder = write_bundle(layout.bundles / "0123456789abcdef", manifest(), sources(tmp_path / "model"))
    os.utime(folder, (0, 0))
    with BundleFiles.open(folder):
        assert in_use(layout) == {bundle_name(folder)}
        assert folder.stat().st_mtime > time.time() - HOUR, "and used now"
    assert in_use(layout) == set()


def test_a_bundle_elsewhere_needs_no_lease(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "bundle", manifest(), sources(tmp_path / "model"))
    with BundleFiles.open(folder):
        assert not (tmp_path / "leases").exists()


HOLDER = """
    import sys, time
    from llmc.artifacts.store.layout import Layout
    from llmc.artifacts.store.leases import Lease
    lease = Lease(Layout(sys.argv[1]))
    lease.hold(sys.argv[2])
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lease_dies_with_its_process(layout: Layout) -> None:
    holder = child(HOLDER, layout.root, ONE)
    assert holder.stdout is not None
    holder.stdout.readline()
    assert in_use(layout) == {ONE}
    holder.kill()
    holder.communicate()
    path = the_file(layout)
    assert in_use(layout) == set(), "its lock is free"
    assert path.exists()
    assert in_use(layout, sweep=True) == set()
    assert not path.exists()


def test_a_forked_process_neither_ends_nor_inherits_the_lease(layout: Layout) -> None:
    lease = Lease(layout)
    lease.hold(ONE)
    pid = os.fork()
    if pid == 0:
        lease.hold(OTHER)
        mine = len(files_below(layout.leases)) == 2
        lease.release()
        os._exit(0 if mine else 1)
    assert os.waitpid(pid, 0)[1] == 0, "it makes one of its own"
    assert in_use(layout) == {ONE}


def test_a_lease_that_was_removed_is_built_again(layout: Layout) -> None:
    lease = Lease(layout)
    lease.hold(ONE)
    the_file(layout).unlink()
    assert lease.hold(ONE), "it was without protection for a while"
    assert in_use(layout) == {ONE}


def test_where_locks_do_nothing_a_lease_counts_for_an_hour(layout: Layout, no_locks: None) -> None:
    lease = Lease(layout)
    lease.hold(ONE)
    now = the_file(layout).stat().st_mtime
    assert in_use(layout, now + HOUR - 1) == {ONE}
    assert in_use(layout, now + HOUR + 1) == set()
    assert in_use(layout, now - HOUR - 1) == set(), "nor for ever when its time lies in the future"
    assert in_use(layout, now + HOUR + 1, sweep=True) == set()
    assert lease.hold(ONE), "swept, but used again: it is noted again"
    assert in_use(layout) == {ONE}


def test_a_lease_in_use_is_renewed_where_locks_do_nothing(
    layout: Layout, no_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Lease(layout)
    lease.hold(ONE)
    os.utime(the_file(layout), (0, 0))
    monkeypatch.setattr(leases, "RENEW_SECONDS", -1.0)
    assert not lease.hold(ONE)
    assert in_use(layout) == {ONE}


def test_a_free_lease_of_another_machine_counts_for_an_hour(layout: Layout) -> None:
    """Its lock may be held where it is invisible from here."""
    layout.leases.mkdir(parents=True)
    path = layout.leases / ("a" * 24)
    path.write_text(f"host elsewhere\n{ONE}")
    now = path.stat().st_mtime
    assert in_use(layout, now + HOUR - 1) == {ONE}
    assert in_use(layout, now + HOUR + 1) == set()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"host x\nentries/../../etc\nblobs/12\n", b"\n" * 100])
def test_what_is_not_a_name_is_passed_over(layout: Layout, content: bytes) -> None:
    layout.leases.mkdir(parents=True)
    (layout.leases / ("a" * 24)).write_bytes(content + f"\n{ONE}".encode())
    assert in_use(layout) <= {ONE}


def test_a_torn_line_spoils_only_itself(layout: Layout) -> None:
    lease = Lease(layout)
    lease.hold(ONE)
    with the_file(layout).open("ab") as file:
        file.write(b"\nbundles/0123456789")
        file.flush()
    os.lseek(lease._fd, 0, os.SEEK_END)  # type: ignore[arg-type]
    lease.hold(OTHER)
    assert in_use(layout) == {ONE, OTHER}


def test_no_lease_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file, where a folder should be")
    lease = Lease(Layout(tmp_path / "store"))
    assert lease.hold(ONE)
    assert in_use(Layout(tmp_path / "store")) == set()
    lease.release()


def test_a_full_disk_keeps_what_was_noted(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    lease = Lease(layout)
    lease.hold(ONE)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(leases, "write_all", full)
        lease.hold(OTHER)
    assert in_use(layout) == {ONE}


def test_a_shared_store_gets_no_lease(tmp_path: Path) -> None:
    owner = Store(tmp_path / "shared")
    owner.publish(key(), {"graph": owner.put_bytes(b"graph")})
    del owner
    before = files_below(tmp_path / "shared")
    store = Store(tmp_path / "store", shared=[tmp_path / "shared"])
    assert store.lookup(key()) is not None
    assert files_below(tmp_path / "shared") == before
