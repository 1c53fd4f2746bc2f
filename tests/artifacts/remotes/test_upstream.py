"""Read-through: a store asks a remote before it builds, and does well without one."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmc.artifacts.bundle.manifest import SIGNATURE_NAME
from llmc.artifacts.bundle.trust import Trust
from llmc.artifacts.digest import Blob
from llmc.artifacts.key import Key
from llmc.artifacts.local.opening import open_store
from llmc.artifacts.remotes.base import Remote, RemoteError, blob_name, entry_name
from llmc.artifacts.remotes.folder import FolderRemote
from llmc.artifacts.remotes.read_through import RemoteUpstream
from llmc.artifacts.remotes.transfer import push
from llmc.artifacts.store.entries import Entry
from llmc.artifacts.store.store import Store
from llmc.artifacts.store.workspace import Workspace
from llmc.errors import DeviceError
from llmc.settings import Settings
from tests.artifacts.helpers import DIGESTS, Faults, files_below, flip, key, manifest, overwrite
from tests.artifacts.remotes.helpers import FakeSigner, FakeTrust, Proxy, Watched, add_manifest, fill, native_key
from tests.timing import PATIENCE_S

TRUST = FakeTrust("alice")


@pytest.fixture
def entries(store: Store, far: Path) -> list[Entry]:
    """What the remote has."""
    built = fill(store)
    push(store, built, FolderRemote(str(far)))
    return built


def reading(root: Path, remote: Remote | Callable[[], Remote], trust: Trust = TRUST) -> Store:
    """An empty store that asks a remote."""
    return Store(root, upstream=RemoteUpstream(remote if callable(remote) else lambda: remote, lambda: trust))


def never(space: Workspace) -> Mapping[str, Blob]:
    raise AssertionError("built, although it could be fetched")


def own(space: Workspace) -> Mapping[str, Blob]:
    return {"own": space.put_bytes(b"own")}


def test_what_is_looked_up_only_is_fetched_if_requested(far: Path, entries: list[Entry], tmp_path: Path) -> None:
    target = reading(tmp_path / "target", Watched(far))
    assert target.lookup(entries[0].key) is None
    found = target.obtain(entries[0].key)
    assert found is not None and found.outputs == entries[0].outputs
    assert target.lookup(entries[0].key) is not None
    assert target.obtain(key(batch=99)) is None


def test_what_the_remote_has_is_not_built(far: Path, entries: list[Entry], tmp_path: Path) -> None:
    target = reading(tmp_path / "target", Watched(far))
    found, hit = target.get_or_build(entries[0].key, never)
    assert hit and found.outputs == entries[0].outputs
    assert target.get_bytes(found.outputs["graph"].digest) == b"0" * 1000
    assert target.counters == {"hits": 1, "misses": 1, "fetched": 1, "corrupt": 0}
    assert Store(target.root).lookup(entries[0].key, verify=True) is not None
    assert files_below(target.layout.temporaries) == []


def test_what_the_store_has_is_not_requested(far: Path, entries: list[Entry], store: Store) -> None:
    remote = Watched(far)
    both = reading(store.root, remote)
    assert both.get_or_build(entries[0].key, never)[1]
    assert remote.calls == []


def test_only_blobs_that_are_missing_are_moved(far: Path, entries: list[Entry], tmp_path: Path) -> None:
    remote = Watched(far)
    target = reading(tmp_path / "target", remote)
    for entry in entries:
        target.get_or_build(entry.key, never)
    assert len(remote.names("download")) == 4


def test_what_the_remote_does_not_have_is_built(far: Path, entries: list[Entry], tmp_path: Path) -> None:
    target = reading(tmp_path / "target", Watched(far))
    assert target.get_or_build(key(number=99), own)[1] is False


def test_results_of_this_machine_only_are_never_requested(far: Path, entries: list[Entry], tmp_path: Path) -> None:
    remote = Watched(far)
    reading(tmp_path / "target", remote).get_or_build(Key("local-digests", {"a": 1}), own)
    assert remote.calls == []


def test_many_threads_fetch_at_once(far: Path, entries: list[Entry], tmp_path: Path) -> None:
    remote = Watched(far)
    target = reading(tmp_path / "target", remote)
    with ThreadPoolExecutor(12) as pool:
        results = list(pool.map(lambda n: target.get_or_build(entries[n % 3].key, never), range(24)))
    assert all(hit for _, hit in results)
    assert len(remote.names("download")) == 4
    assert target.verify().bad == []


def test_a_damaged_blob_here_is_replaced_from_there(far: Path, entries: list[Entry], tmp_path: Path) -> None:
    target = reading(tmp_path / "target", Watched(far))
    found, _ = target.get_or_build(entries[0].key, never)
    flip(target.path(found.outputs["graph"]))
    again, hit = Store(target.root, upstream=RemoteUpstream(lambda: Watched(far), lambda: TRUST)).get_or_build(
        entries[0].key, never
    )
    assert hit and target.get_bytes(again.outputs["graph"].digest) == b"0" * 1000


# What is damaged or not trusted is built


@pytest.mark.parametrize("what", ["entry", "blob", "no blob", "other entry"])
def test_damage_in_the_remote_is_a_miss_with_a_warning(
    far: Path, entries: list[Entry], tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    path = far / entry_name(entries[0].key)
    blob = far / blob_name(entries[0].outputs["graph"].digest)
    if what == "entry":
        flip(path)
    elif what == "other entry":
        overwrite(path, (far / entry_name(entries[1].key)).read_bytes())
    elif what == "blob":
        flip(blob)
    else:
        blob.unlink()
    target = reading(tmp_path / "target", Watched(far))
    _, hit = target.get_or_build(entries[0].key, own)
    assert not hit
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "built here" in caplog.text and ("push it again" in caplog.text or "delete it" in caplog.text)
    assert target.get_or_build(entries[2].key, never)[1]  # the remote is still asked


def test_native_code_without_a_trusted_signature_is_built_here(
    far: Path, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    built = [store.publish(native_key(n=n), {"code": store.put_bytes(b"%d" % n)}) for n in range(3)]
    push(store, built[:2], FolderRemote(str(far)))
    push(store, built[2:], FolderRemote(str(far)), signer=FakeSigner())
    remote = Watched(far)
    target = reading(tmp_path / "target", remote)
    with caplog.at_level(logging.INFO, "llmc.artifacts"):
        assert [target.get_or_build(entry.key, own)[1] for entry in built] == [False, False, True]
    refusals = [record for record in caplog.records if "--allow-unsigned" in record.message]
    assert [record.levelno for record in refusals] == [logging.WARNING, logging.INFO]
    assert len(remote.names("download")) == 1
    allowing = reading(tmp_path / "allowing", Watched(far), FakeTrust(allow=True))
    assert allowing.get_or_build(built[0].key, never)[1]


def test_a_bundle_comes_with_its_signature(far: Path, store: Store, tmp_path: Path) -> None:
    bundle = add_manifest(store)
    push(store, [bundle], FolderRemote(str(far)), signer=FakeSigner())
    target = reading(tmp_path / "target", Watched(far))
    found, hit = target.get_or_build(bundle.key, never)
    assert hit and SIGNATURE_NAME in found.outputs
    assert target.get_bytes(DIGESTS["weights"])
    refused = reading(tmp_path / "refused", Watched(far), FakeTrust("bob"))
    assert refused.get_or_build(bundle.key, own)[1] is False
    assert manifest().digest == bundle.key.components["manifest"]


def test_a_check_that_is_not_installed_is_a_warning(
    far: Path, entries: list[Entry], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> Trust:
        raise DeviceError("cryptography is not installed; install it with: pip install 'llmc-compiler[sign]'")

    target = Store(tmp_path / "target", upstream=RemoteUpstream(lambda: Watched(far), missing))
    assert target.get_or_build(entries[0].key, own)[1] is False
    assert "pip install 'llmc-compiler[sign]'" in caplog.text


# Offline


def test_offline_it_says_so_once_and_requests_no_more(
    far: Path, entries: list[Entry], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def away(verb: str, name: str) -> None:
        raise RemoteError("s3://bucket: cannot be reached; try again")

    remote = Watched(far, away)
    target = reading(tmp_path / "target", remote)
    for entry in entries:
        assert target.get_or_build(entry.key, own)[1] is False
    assert len(remote.calls) == 1
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message == "continuing without the remote store: s3://bucket: cannot be reached; try again"


def test_offline_in_many_threads_it_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gather = threading.Barrier(6)

    def away(verb: str, name: str) -> None:
        gather.wait(PATIENCE_S)
        raise RemoteError("away")

    target = reading(tmp_path / "target", Watched(tmp_path / "gone", away))
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda n: target.get_or_build(key(number=n), own), range(6)))
    assert not any(hit for _, hit in results)
    assert len(caplog.records) == 1


def test_a_remote_that_breaks_off_midway_is_left_alone(
    far: Path, entries: list[Entry], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(verb: str, name: str) -> None:
        if verb == "download":
            raise RemoteError("connection lost")

    remote = Watched(far, breaks)
    target = reading(tmp_path / "target", remote)
    assert [target.get_or_build(entry.key, own)[1] for entry in entries] == [False] * 3
    assert len(remote.names("read")) == 1
    assert "connection lost" in caplog.text


def test_a_real_server_that_refuses_does_not_stop_a_compile(
    s3: Callable[[], Remote], proxy: Proxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.refusing = True
    target = reading(tmp_path / "target", s3)
    assert target.get_or_build(key(), own)[1] is False
    assert "continuing without the remote store: s3://bucket" in caplog.text


# No room here


def test_a_store_without_room_keeps_what_it_fetches_elsewhere(
    far: Path, entries: list[Entry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = reading(tmp_path / "target", Watched(far))
    Faults(monkeypatch, target.root).inject("write", errno.ENOSPC)
    found, hit = target.get_or_build(entries[0].key, never)
    assert hit and target.get_bytes(found.outputs["graph"].digest) == b"0" * 1000


# The settings


def test_the_settings_name_the_remote_and_who_is_trusted(
    far: Path, entries: list[Entry], tmp_path: Path, store: Store
) -> None:
    native = store.publish(native_key(), {"code": store.put_bytes(b"code")})
    push(store, [native], FolderRemote(str(far)))
    environment = {"LLMC_REMOTE_CACHE": str(far), "LLMC_TRUSTED_KEYS": str(tmp_path / "keys")}
    target = open_store(tmp_path / "target", Settings.from_environment(environment))
    assert target.get_or_build(entries[0].key, never)[1]
    assert target.get_or_build(native.key, own)[1] is False
    allowed = open_store(tmp_path / "allowed", Settings.from_environment({**environment, "LLMC_ALLOW_UNSIGNED": "1"}))
    assert allowed.get_or_build(native.key, never)[1]


@pytest.mark.parametrize("url", ["nosuch://place", "s3://[bad", "/nowhere/at/all"])
def test_a_remote_that_cannot_be_is_a_warning(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = open_store(tmp_path / "target", Settings.from_environment({"LLMC_REMOTE_CACHE": url}))
    assert target.get_or_build(key(), own)[1] is False
    assert len([record for record in caplog.records if "continuing without the remote store" in record.message]) == 1


def test_nothing_of_it_is_imported_before_the_first_miss(store: Store) -> None:
    entry = fill(store, 1)[0]
    script = f"""
import sys
from llmc.artifacts.local.opening import open_store
from llmc.settings import Settings
store = open_store({str(store.root)!r}, Settings.from_environment({{"LLMC_REMOTE_CACHE": "memory://x"}}))
assert store.get_or_build(store.find({entry.key.hex!r}).key, None)[1]
print([name for name in sys.modules if name.startswith(("fsspec", "llmc.artifacts.remotes", "tenacity"))])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
