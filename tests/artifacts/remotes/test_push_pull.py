"""Pushing and pulling between stores and a remote: what moves, what stays, and what is kept out."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmc.artifacts.key import Key, canonical_json
from llmc.artifacts.remotes.base import Remote, RemoteError, entry_name
from llmc.artifacts.remotes.folder import FolderRemote
from llmc.artifacts.remotes.transfer import find_names, pull, push
from llmc.artifacts.store.entries import Entry, encode_entry
from llmc.artifacts.store.store import Store
from llmc.errors import ArtifactError, CapacityError, InputError
from tests.artifacts.helpers import files_below, flip, key, overwrite, truncate
from tests.artifacts.remotes.helpers import FakeTrust, Watched, file_of, fill

TRUST = FakeTrust("alice")


def same(one: Entry, other: Entry | None) -> bool:
    return other is not None and encode_entry(one) == encode_entry(other)


# Both ways


def test_what_is_pushed_can_be_pulled_elsewhere(remote: Remote, store: Store, other: Store) -> None:
    entries = fill(store)
    pushed = push(store, entries, remote)
    pulled = pull(other, remote, trust=TRUST)
    size = 3 * 1000 + 300
    assert (pushed.entries, pushed.blobs, pushed.bytes, pushed.skipped_blobs, pushed.refused) == (3, 4, size, 0, ())
    assert (pulled.entries, pulled.blobs, pulled.bytes, pulled.skipped_blobs, pulled.refused) == (3, 4, size, 0, ())
    assert all(same(entry, other.lookup(entry.key, verify=True)) for entry in entries)
    assert other.verify().bad == []


def test_a_second_time_nothing_moves(store: Store, other: Store, far: Path) -> None:
    entries = fill(store)
    push(store, entries, FolderRemote(str(far)))
    remote = Watched(far)
    again = push(store, entries, remote)
    assert (again.entries, again.blobs, again.skipped_blobs, again.skipped_bytes) == (0, 0, 4, 3300)
    pull(other, remote, trust=TRUST)
    remote.calls.clear()
    again = pull(other, remote, trust=TRUST)
    assert (again.entries, again.blobs, again.bytes, again.skipped_blobs) == (0, 0, 0, 4)
    assert remote.names("upload") == remote.names("download") == []


def test_only_what_is_missing_moves(store: Store, other: Store, folder: FolderRemote) -> None:
    first, *rest = fill(store)
    push(store, [first], folder)
    report = push(store, [first, *rest], folder)
    assert (report.entries, report.blobs, report.bytes, report.skipped_blobs) == (2, 2, 2000, 2)
    other.put_bytes(store.get_bytes(first.outputs["graph"].digest))
    report = pull(other, folder, trust=TRUST)
    assert (report.entries, report.blobs, report.bytes, report.skipped_blobs) == (3, 3, 2300, 1)


def test_progress_ends_at_the_total(store: Store, other: Store, folder: FolderRemote) -> None:
    for move in (
        lambda meter: push(store, fill(store), folder, progress=meter),
        lambda meter: pull(other, folder, trust=TRUST, progress=meter),
    ):
        reported: list[tuple[int, int]] = []
        move(lambda done, total, reported=reported: reported.append((done, total)))  # type: ignore[misc]
        assert reported[-1] == (3300, 3300)
        assert reported == sorted(reported)


def test_entries_appear_after_their_blobs(store: Store, far: Path) -> None:
    entries = fill(store)

    def check(verb: str, name: str) -> None:
        if verb == "upload" and "/entries/" in name:
            (entry,) = [entry for entry in entries if entry_name(entry.key) == name]
            assert all(file_of(far, entry, output).exists() for output in entry.outputs)

    assert push(store, entries, Watched(far, check)).entries == 3


def test_results_that_mean_something_here_only_stay_here(store: Store, other: Store, far: Path) -> None:
    local = store.publish(Key("local-digests", {"a": 1}), {"x": store.put_bytes(b"x")})
    assert push(store, store.entries(), FolderRemote(str(far))).entries == 0
    assert not far.exists()
    path = file_of(far, local)
    path.parent.mkdir(parents=True)
    path.write_bytes(encode_entry(local))
    report = pull(other, FolderRemote(str(far)), trust=TRUST)
    assert (report.entries, report.refused) == (0, ())
    with pytest.raises(InputError, match="can be pulled"):
        pull(other, FolderRemote(str(far)), trust=TRUST, kind="local-digests")


def test_two_pushes_and_two_pulls_at_once(store: Store, tmp_path: Path, far: Path) -> None:
    entries = fill(store, 6, 5000)
    second = Store(tmp_path / "second")
    fill(second, 6, 5000)
    targets = [Store(tmp_path / "target"), Store(tmp_path / "target")]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: push(one, one.entries(), FolderRemote(str(far))), (store, second)))
        reports = list(pool.map(lambda one: pull(one, FolderRemote(str(far)), trust=TRUST), targets))
    assert sum(report.bytes for report in reports) == 6 * 5000 + 300
    assert Store(far).verify().bad == targets[0].verify().bad == []
    assert all(targets[1].lookup(entry.key, verify=True) for entry in entries)


# Choosing


def test_keys_and_kinds_choose(store: Store, other: Store, folder: FolderRemote) -> None:
    entries = fill(store)
    weights = store.publish(key("weights"), {})
    push(store, store.entries(), folder)
    assert pull(other, folder, trust=TRUST, kind="weights").entries == 1
    assert pull(other, folder, trust=TRUST, keys=[entries[1].key.short, weights.key.digest]).entries == 1
    assert {entry.key for entry in other.entries()} == {weights.key, entries[1].key}


@pytest.mark.parametrize(
    ("requested", "error"), [("abc", InputError), ("0000000000", ArtifactError), ("../../etc", ArtifactError)]
)
def test_a_key_that_is_not_there(
    store: Store, other: Store, folder: FolderRemote, requested: str, error: type[Exception]
) -> None:
    push(store, fill(store), folder)
    with pytest.raises(error):
        pull(other, folder, trust=TRUST, keys=[requested])


def test_a_key_that_could_be_several(store: Store, folder: FolderRemote, far: Path) -> None:
    entry = fill(store, 1)[0]
    push(store, [entry], folder)
    twin = far / "v1/entries/twin" / file_of(far, entry).name
    twin.parent.mkdir()
    twin.write_bytes(b"{}")
    with pytest.raises(ArtifactError, match="ambiguous"):
        find_names(folder, [entry.key.short])


def test_strangers_in_the_remote_are_passed_over(store: Store, folder: FolderRemote, far: Path) -> None:
    entry = fill(store, 1)[0]
    push(store, [entry], folder)
    for name in ("README", "executable/notes.json", f"Bad Kind/{'a' * 64}.json", f"executable/x/{'a' * 64}.json"):
        path = far / "v1/entries" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    assert find_names(folder) == [entry_name(entry.key)]


# Damage, in the store and in the remote


def test_a_blob_that_is_damaged_here_does_not_stop_the_rest(store: Store, folder: FolderRemote, far: Path) -> None:
    entries = fill(store)
    flip(store.path(entries[1].outputs["graph"]))
    report = push(store, entries, folder)
    assert (report.entries, report.blobs) == (2, 3)
    (refused,) = report.refused
    assert refused.name == f"executable {entries[1].key.short}"
    assert not file_of(far, entries[1]).exists()


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_a_damaged_blob_in_the_remote_is_named_and_the_rest_comes(
    store: Store, other: Store, folder: FolderRemote, far: Path, damage: Callable[[Path], None]
) -> None:
    entries = fill(store)
    push(store, entries, folder)
    damage(file_of(far, entries[1], "graph"))
    report = pull(other, folder, trust=TRUST)
    assert (report.entries, report.blobs) == (2, 3)
    (refused,) = report.refused
    assert refused.name == f"executable {entries[1].key.short}"
    assert "push it again" in refused.reason
    assert other.lookup(entries[1].key) is None
    assert files_below(other.layout.temporaries) == []
    assert push(store, entries, folder).blobs == (0 if damage is flip else 1)


def bad_schema(data: bytes) -> bytes:
    from llmc.artifacts.digest import digest_bytes

    body = json.loads(data)["entry"] | {"schema": 99}
    return canonical_json({"digest": digest_bytes(canonical_json(body)), "entry": body})


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[: len(data) // 2], "not an entry"),
        (lambda data: data.replace(b'"n":1', b'"n":7'), "content was altered"),
        (lambda data: b"[" * 100_000, "not an entry"),
        (lambda data: b"", "not an entry"),
        (lambda data: b" " * (17 << 20), "larger than"),
        (bad_schema, "schema 99"),
    ],
)
def test_a_damaged_entry_in_the_remote_is_named_and_the_rest_comes(
    store: Store, other: Store, folder: FolderRemote, far: Path, damage: Callable[[bytes], bytes], reason: str
) -> None:
    entries = fill(store)
    push(store, entries, folder)
    path = file_of(far, entries[1])
    overwrite(path, damage(path.read_bytes()))
    report = pull(other, folder, trust=TRUST)
    assert report.entries == 2
    (refused,) = report.refused
    assert refused.name == f"executable {entries[1].key.short}"
    assert reason in refused.reason
    assert push(store, entries, folder).entries == 1  # heals
    assert pull(other, folder, trust=TRUST).refused == ()


def test_an_entry_under_another_name_is_not_taken(store: Store, other: Store, folder: FolderRemote, far: Path) -> None:
    entries = fill(store, 2)
    push(store, entries, folder)
    overwrite(file_of(far, entries[0]), file_of(far, entries[1]).read_bytes())
    report = pull(other, folder, trust=TRUST)
    assert "belongs to" in report.refused[0].reason
    assert other.lookup(entries[0].key) is None


def test_an_entry_that_lies_about_a_size_gets_nothing_in(
    store: Store, other: Store, folder: FolderRemote, far: Path
) -> None:
    (entry,) = fill(store, 1)
    push(store, [entry], folder)
    for size in (10, 10**15):
        outputs = {name: blob._replace(size=size) for name, blob in entry.outputs.items()}
        overwrite(file_of(far, entry), encode_entry(entry._replace(outputs=outputs)))
        report = pull(other, folder, trust=TRUST)
        assert (report.entries, report.blobs, len(report.refused)) == (0, 0, 1)
    assert files_below(other.layout.base / "blobs") == files_below(other.layout.temporaries) == []


# Failure of the remote, and of the store


def test_a_remote_that_breaks_off_ends_the_push_at_once_and_it_can_go_on(store: Store, far: Path) -> None:
    entries = fill(store, 30)
    uploads = 0

    def breaks(verb: str, name: str) -> None:
        nonlocal uploads
        uploads += verb == "upload"
        if uploads > 5:
            raise RemoteError("watched: connection lost; try again")

    remote = Watched(far, breaks)
    with pytest.raises(RemoteError, match="connection lost"):
        push(store, entries, remote, jobs=2)
    assert len(remote.names("upload")) < 10
    assert Store(far).verify().bad == []
    report = push(store, entries, FolderRemote(str(far)))
    assert 4 <= report.skipped_blobs <= 5  # the sixth took another one along, or not
    assert report.skipped_blobs + report.blobs == 31


def test_a_remote_that_breaks_off_ends_the_pull_at_once(
    store: Store, other: Store, folder: FolderRemote, far: Path
) -> None:
    push(store, fill(store, 30), folder)

    def breaks(verb: str, name: str) -> None:
        if verb == "download" and len(remote.names("download")) > 5:
            raise RemoteError("watched: connection lost; try again")

    remote = Watched(far, breaks)
    with pytest.raises(RemoteError, match="connection lost"):
        pull(other, remote, trust=TRUST, jobs=2)
    assert len(remote.names("download")) < 10
    assert other.verify().bad == []
    report = pull(other, folder, trust=TRUST)
    assert 4 <= report.skipped_blobs <= 5
    assert (report.skipped_blobs + report.blobs, report.entries) == (31, 30)


def test_an_interrupt_ends_all(store: Store, far: Path) -> None:
    def breaks(verb: str, name: str) -> None:
        if verb == "upload":
            raise KeyboardInterrupt

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        push(store, fill(store), Watched(far, breaks))
    assert not [thread.name for thread in threading.enumerate() if thread not in before]


def test_a_full_store_ends_a_pull(
    store: Store, other: Store, folder: FolderRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from tests.artifacts.helpers import Faults

    push(store, fill(store), folder)
    with monkeypatch.context() as patch:
        Faults(patch, other.root).inject("write", errno.ENOSPC)
        with pytest.raises(CapacityError):
            pull(other, folder, trust=TRUST)
    assert files_below(other.root) == []
    assert pull(other, folder, trust=TRUST).entries == 3


def test_an_empty_remote_and_one_that_is_not_there(store: Store, other: Store, far: Path) -> None:
    with pytest.raises(RemoteError, match="is it mounted"):
        pull(other, FolderRemote(str(far)), trust=TRUST)
    far.mkdir()
    assert pull(other, FolderRemote(str(far)), trust=TRUST).entries == 0
    assert push(store, [], FolderRemote(str(far))).entries == 0
