"""Every sort of remote keeps the contract of base.py."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest

from llmc.artifacts.remotes import open_remote
from llmc.artifacts.remotes.base import (
    ObjectError,
    Remote,
    RemoteError,
    blob_name,
    entries_prefix,
    entry_name,
    temporaries_prefix,
)
from llmc.artifacts.remotes.folder import FolderRemote
from llmc.artifacts.remotes.fsspec_remote import FsspecRemote
from llmc.artifacts.remotes.mover import Mover
from llmc.artifacts.store.layout import Layout
from llmc.errors import DeviceError, InputError
from llmc.platforms import install_line
from tests.artifacts.helpers import files_below, key
from tests.timing import PATIENCE_S, until

NAME = "v1/blobs/sha256/ab/cdef"


def nothing(_: int) -> None:
    pass


def test_names_are_the_layout_of_a_store(tmp_path: Path) -> None:
    layout, digest = Layout(tmp_path), "sha256:" + "ab" * 32
    assert tmp_path / blob_name(digest) == layout.blob(digest)
    assert tmp_path / entry_name(key()) == layout.entry(key().kind, key().hex)
    assert tmp_path / entries_prefix("k") == layout.entries / "k"
    assert tmp_path / temporaries_prefix() == layout.temporaries


def test_what_is_uploaded_is_there(remote: Remote, tmp_path: Path) -> None:
    reported: list[int] = []
    remote.upload(NAME, b"content", reported.append)
    file = tmp_path / "file"
    file.write_bytes(b"f" * 100_000)
    remote.upload("v1/entries/k/x.json", file, reported.append)
    assert sum(reported) == 7 + 100_000
    assert remote.size(NAME) == 7
    assert remote.read(NAME, 7) == b"content"
    assert b"".join(remote.download(NAME, 3, 7)) == b"tent"
    assert b"".join(remote.download("v1/entries/k/x.json", 0, 100_000)) == file.read_bytes()
    assert sorted(remote.list("v1")) == [NAME, "v1/entries/k/x.json"]
    assert list(remote.list("v1/entries")) == ["v1/entries/k/x.json"]


def test_an_upload_replaces(remote: Remote) -> None:
    remote.upload(NAME, b"old content", nothing)
    remote.upload(NAME, b"new", nothing)
    assert remote.read(NAME, 100) == b"new"
    assert list(remote.list("v1")) == [NAME]


def test_what_is_not_there_is_none(remote: Remote) -> None:
    remote.upload("v1/other", b"x", nothing)
    assert remote.size(NAME) is None
    assert remote.size("v1/oth") is None
    assert remote.read(NAME, 10) is None
    assert list(remote.list("v1/entries")) == []
    with pytest.raises(ObjectError, match="missing"):
        list(remote.download(NAME, 0, 10))
    remote.delete(NAME)


def test_delete_removes(remote: Remote) -> None:
    remote.upload(NAME, b"x", nothing)
    remote.delete(NAME)
    assert remote.size(NAME) is None


def test_a_small_object_that_is_large_is_not_read(remote: Remote) -> None:
    remote.upload(NAME, b"12345678", nothing)
    with pytest.raises(ObjectError, match="larger than 7 bytes"):
        remote.read(NAME, 7)


@pytest.mark.parametrize("claimed", [9, 7, 1])
def test_a_size_that_is_not_true_is_noticed(remote: Remote, claimed: int) -> None:
    remote.upload(NAME, b"12345678", nothing)
    with pytest.raises(ObjectError):
        list(remote.download(NAME, 0, claimed))


def test_going_on_behind_the_end_is_noticed(remote: Remote) -> None:
    remote.upload(NAME, b"12345678", nothing)
    with pytest.raises(ObjectError):
        list(remote.download(NAME, 20, 30))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    size = 50_000
    monkeypatch.setattr("llmc.artifacts.remotes.fsspec_remote.PIECE", size)
    return size


def test_many_pieces_come_in_order_from_any_byte(remote: Remote, tmp_path: Path, small_pieces: int) -> None:
    data = os.urandom(12 * small_pieces + 17)
    (tmp_path / "file").write_bytes(data)
    remote.upload(NAME, tmp_path / "file", nothing)
    start = small_pieces - 3
    assert b"".join(remote.download(NAME, start, len(data))) == data[start:]


def test_a_download_that_is_left_alone_ends(remote: Remote, small_pieces: int) -> None:
    remote.upload(NAME, b"x" * 8 * small_pieces, nothing)
    pieces = remote.download(NAME, 0, 8 * small_pieces)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("sort", ["folder", "local"])
def test_an_upload_that_fails_leaves_nothing(sort: str, tmp_path: Path) -> None:
    location = str(tmp_path / "remote") if sort == "folder" else f"local://{tmp_path}/remote"
    remote = open_remote(location)

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    (tmp_path / "file").write_bytes(b"x" * 3000)
    with pytest.raises(KeyboardInterrupt):
        remote.upload(NAME, tmp_path / "file", stop)
    assert files_below(tmp_path / "remote") == []


def test_a_folder_that_is_a_remote_is_a_store(tmp_path: Path) -> None:
    remote = FolderRemote(f"file://{tmp_path}/with%20space")
    remote.upload(NAME, b"x", nothing)
    assert (tmp_path / "with space" / NAME).stat().st_mode & 0o777 == 0o444
    assert remote.url == str(tmp_path / "with space")


def test_a_mount_that_is_gone_is_not_an_empty_remote(tmp_path: Path) -> None:
    remote = FolderRemote(str(tmp_path / "gone" / "store"))
    for ask in (lambda: remote.size(NAME), lambda: remote.read(NAME, 9), lambda: list(remote.list("v1"))):
        with pytest.raises(RemoteError, match="is it mounted"):
            ask()
    with pytest.raises(RemoteError, match="is it mounted"):
        remote.upload(NAME, b"x", nothing)
    assert not (tmp_path / "gone").exists()


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "remote").write_text("a file")
    with pytest.raises(RemoteError, match="check the folder"):
        FolderRemote(str(tmp_path / "remote")).upload(NAME, b"x", nothing)


@pytest.mark.parametrize("url", ["nosuch://place", "file://elsewhere/store", "file:relative"])
def test_a_url_that_names_nothing(url: str) -> None:
    with pytest.raises(InputError):
        open_remote(url)


def test_a_package_that_is_missing_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(DeviceError, match=rf"{re.escape(install_line('remote'))}"):
        open_remote("memory://place")


def test_a_protocol_that_is_not_installed_is_an_error_of_its_own() -> None:
    with pytest.raises(DeviceError, match="gcs"):
        open_remote("gs://bucket/llmc")


def test_what_ended_all_transfers_is_reported_and_not_that_they_ended(memory: FsspecRemote, tmp_path: Path) -> None:
    (source := tmp_path / "source").write_bytes(b"x")
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise RemoteError("the reason")

    def late(count: int) -> None:
        failed.wait(PATIENCE_S)
        until(lambda: mover.stopped)
        mover.moved(count)

    with Mover(2) as mover:
        uploading = mover.run(memory.upload, "name", source, late)
        mover.run(fail)
        with pytest.raises(RemoteError, match=r"^the reason$"):
            mover.result(uploading)
