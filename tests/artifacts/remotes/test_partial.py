"""A download goes on where it was cut off, and nothing but the right bytes gets in."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.atomic_write import UnwritableError
from llmc.artifacts.remotes.base import ObjectError, RemoteError
from llmc.artifacts.remotes.ingest import bring, fetch_blob
from llmc.artifacts.store.workspace import Area
from llmc.errors import CapacityError
from tests.artifacts.helpers import Faults, files_below
from tests.artifacts.remotes.helpers import Pieces, blob_of
from tests.tiers import examples
from tests.timing import PATIENCE_S, until

DATA = os.urandom(1000)
BLOB = blob_of(DATA)


class Count:
    def __init__(self) -> None:
        self.total = 0

    def __call__(self, count: int) -> None:
        self.total += count


@pytest.fixture
def area(tmp_path: Path) -> Area:
    return Area(tmp_path / "store")


def partial(area: Area) -> Path:
    return area.layout.temporaries / f"partial-{BLOB.digest[7:]}"


def content(area: Area) -> bytes | None:
    path = area.blobs.find(*BLOB)
    return None if path is None else path.read_bytes()


def test_a_blob_is_fetched_verified_and_read_only(area: Area) -> None:
    count = Count()
    assert fetch_blob(Pieces(DATA), area, BLOB, count) == count.total == 1000
    assert content(area) == DATA
    assert area.layout.blob(BLOB.digest).stat().st_mode & 0o777 == 0o444
    assert files_below(area.layout.temporaries) == []


def test_one_that_is_there_is_not_requested(area: Area) -> None:
    area.blobs.put_bytes(DATA)
    remote, count = Pieces(DATA), Count()
    assert fetch_blob(remote, area, BLOB, count) == 0
    assert (remote.starts, count.total) == ([], 1000)
    assert files_below(area.layout.temporaries) == []


def test_contents_that_were_read_already_are_used(area: Area) -> None:
    remote, count = Pieces(DATA), Count()
    assert bring(area, remote, BLOB, {BLOB.digest: DATA}, count) == count.total == 1000
    assert (remote.starts, content(area)) == ([], DATA)


def test_an_empty_blob(area: Area) -> None:
    empty = blob_of(b"")
    assert fetch_blob(Pieces(b""), area, empty, Count()) == 0
    assert area.blobs.find(*empty) is not None


@examples(25)
@given(st.lists(st.integers(0, 1000), max_size=4), st.sampled_from([RemoteError, KeyboardInterrupt]))
def test_it_goes_on_from_the_byte_it_had(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], error: type[BaseException]
) -> None:
    area = Area(tmp_path_factory.mktemp("store"))
    have = 0
    for cut in cuts:
        remote = Pieces(DATA, 100, cut, error("the connection broke"))  # type: ignore[arg-type]
        expected = [] if have == 1000 else [have]
        try:
            fetch_blob(remote, area, BLOB, Count())
        except (RemoteError, KeyboardInterrupt):
            assert remote.starts == expected
            have = partial(area).stat().st_size if partial(area).exists() else 0
        else:
            break
    remote, count = Pieces(DATA), Count()
    moved = fetch_blob(remote, area, BLOB, count)
    assert moved == sum(1000 - start for start in remote.starts)
    assert count.total == 1000
    assert content(area) == DATA


@examples(25)
@given(st.binary(max_size=1500))
def test_whatever_lies_in_its_place_only_the_right_bytes_get_in(
    tmp_path_factory: pytest.TempPathFactory, garbage: bytes
) -> None:
    area = Area(tmp_path_factory.mktemp("store"))
    area.layout.temporaries.mkdir(parents=True)
    partial(area).write_bytes(garbage)
    count = Count()
    fetch_blob(Pieces(DATA), area, BLOB, count)
    assert content(area) == DATA
    assert count.total == 1000


@pytest.mark.parametrize(
    "data",
    [DATA[:-1], bytes(1000), DATA[:500] + bytes([DATA[500] ^ 1]) + DATA[501:]],
    ids=["shorter", "zeros", "a bit"],
)
def test_other_content_is_thrown_away(area: Area, data: bytes) -> None:
    count = Count()
    with pytest.raises(ObjectError, match="is damaged"):
        fetch_blob(Pieces(data), area, BLOB, count)
    assert content(area) is None
    assert count.total == 0
    assert files_below(area.layout.root) == []


def test_a_remote_that_sends_more_than_there_should_be_is_cut_off(area: Area, tmp_path: Path) -> None:
    from llmc.artifacts.remotes.folder import FolderRemote
    from tests.artifacts.helpers import overwrite

    remote = FolderRemote(str(tmp_path / "remote"))
    remote.upload(f"v1/blobs/sha256/{BLOB.digest[7:9]}/{BLOB.digest[9:]}", DATA, lambda _: None)
    (file,) = files_below(tmp_path / "remote")
    overwrite(file, DATA * 1000)
    with pytest.raises(ObjectError, match="1000000 bytes, expected 1000"):
        fetch_blob(remote, area, BLOB, Count())
    assert files_below(area.layout.root) == []


def test_two_threads_that_want_one_blob_move_it_once(area: Area) -> None:
    go = threading.Event()

    class Slow(Pieces):
        def download(self, name: str, start: int, size: int) -> Iterator[bytes]:
            go.wait(PATIENCE_S)
            return super().download(name, start, size)

    remote = Slow(DATA)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(fetch_blob, remote, area, BLOB, Count()) for _ in range(4)]
        until(lambda: partial(area).exists())
        go.set()
        assert sorted(future.result() for future in futures) == [0, 0, 0, 1000]
    assert remote.starts == [0]
    assert files_below(area.layout.temporaries) == []


def test_one_that_waited_begins_anew_when_the_other_met_damage(area: Area) -> None:
    go = threading.Event()

    class Slow(Pieces):
        def download(self, name: str, start: int, size: int) -> Iterator[bytes]:
            go.wait(PATIENCE_S)
            return super().download(name, start, size)

    waiting = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(fetch_blob, Slow(bytes(1000)), area, BLOB, Count())
        until(lambda: partial(area).exists())
        second = pool.submit(fetch_blob, Pieces(DATA), area, BLOB, lambda _: waiting.set())
        assert waiting.wait(PATIENCE_S)
        go.set()
        with pytest.raises(ObjectError):
            first.result()
        assert second.result() == 1000
    assert content(area) == DATA


def test_a_file_that_was_taken_away_before_it_was_locked_is_opened_again(
    area: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    lock = fcntl.flock
    taken: list[bool] = []

    def take_away(fd: int, operation: int) -> None:
        if not taken:
            taken.append(True)
            partial(area).unlink()
        lock(fd, operation)

    monkeypatch.setattr("fcntl.flock", take_away)
    assert fetch_blob(Pieces(DATA), area, BLOB, Count()) == 1000
    assert taken and content(area) == DATA


def test_where_locks_cannot_be_had_each_has_a_file_of_its_own(area: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(RemoteError):
        fetch_blob(Pieces(DATA, cut=500, error=RemoteError("gone")), area, BLOB, Count())
    remote = Pieces(DATA)
    assert fetch_blob(remote, area, BLOB, Count()) == 1000
    assert content(area) == DATA
    assert [path for path in files_below(area.layout.temporaries) if path.stat().st_size] == []


def test_where_locks_do_nothing_all_is_right_all_the_same(area: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(fetch_blob, Pieces(DATA, 10), area, BLOB, Count()) for _ in range(4)]:
            future.result()
    assert content(area) == DATA


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_full_disk_leaves_nothing(area: Area, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    with monkeypatch.context() as patch:
        Faults(patch, area.layout.root).inject(call, errno.ENOSPC)
        with pytest.raises(CapacityError):
            fetch_blob(Pieces(DATA), area, BLOB, Count())
    assert files_below(area.layout.root) == []
    fetch_blob(Pieces(DATA), area, BLOB, Count())
    assert content(area) == DATA


def test_a_store_that_cannot_be_written_says_so(area: Area) -> None:
    area.layout.root.parent.mkdir(parents=True, exist_ok=True)
    area.layout.root.write_text("a file")
    with pytest.raises(UnwritableError):
        fetch_blob(Pieces(DATA), area, BLOB, Count())
