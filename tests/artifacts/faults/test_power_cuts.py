"""The power may go after any system call: what was published is there, and nothing is served that is not right (P1)."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.writer import write_bundle, write_signature
from llmc.artifacts.digest import Blob
from llmc.artifacts.key import Key
from llmc.artifacts.store.store import Store
from llmc.artifacts.store.workspace import Workspace
from llmc.errors import ArtifactError
from tests.artifacts.faults.disk import Disk
from tests.artifacts.helpers import CONTENT, DIGESTS, key, manifest
from tests.tiers import full

NOTHING = ""
ONE, TWO = key(batch=1), key(batch=2)


class Monitor:
    """What may be found of each thing; NOTHING is one of the answers until it was said to be published."""

    def __init__(self) -> None:
        self.allowed: dict[object, set[str]] = {}

    def may_become(self, name: object, value: str) -> None:
        self.allowed.setdefault(name, {NOTHING}).add(value)

    def is_now(self, name: object, value: str) -> None:
        self.allowed[name] = {value}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def found_in(store: Store, which: Key) -> str:
    entry = store.lookup(which, verify=True)
    if entry is None:
        return NOTHING
    names = {store.get_bytes(blob.digest).partition(b" ")[0].decode() for blob in entry.outputs.values()}
    (name,) = names
    return name


@full
def test_an_entry_is_there_once_it_was_said_to_be_and_is_never_half_there(root: Path) -> None:
    monitor = Monitor()

    def cut(states: Mapping[str, Path]) -> None:
        for state, folder in states.items():
            store = Store(folder / "cache" / "store")
            for which, allowed in monitor.allowed.items():
                assert isinstance(which, Key)
                assert found_in(store, which) in allowed, f"cut {disk.cuts}, {state}"
            shutil.rmtree(folder)

    def builds(name: str) -> Mapping[str, Blob]:
        def build(space: Workspace) -> dict[str, Blob]:
            (space.folder / "graph").write_bytes(f"{name} graph".encode() * 300)
            moved = space.put_file(space.folder / "graph")
            with space.writer() as stream:
                stream.write(f"{name} stream".encode() * 20)
            assert stream.blob is not None
            return {"a": moved, "b": space.put_bytes(f"{name} bytes".encode()), "c": stream.blob}

        return store.get_or_build(which, build)[0].outputs

    disk = Disk(root, cut)
    with disk.watching():
        store = Store(root / "cache" / "store")
        for which in (ONE, TWO):
            monitor.may_become(which, which.short)
            builds(which.short)
            monitor.is_now(which, which.short)
        monitor.may_become(ONE, "new")
        store.publish(ONE, {"a": store.put_bytes(b"new content")})
        monitor.is_now(ONE, "new")
        cut_after_all = store.put_bytes(b"one more")
    assert store.has(cut_after_all)
    assert disk.cuts > 40


def test_a_bundle_is_old_or_new_and_whole(root: Path) -> None:
    monitor = Monitor()

    def cut(states: Mapping[str, Path]) -> None:
        for state, folder in states.items():
            try:
                files = BundleFiles.open(folder / "out" / "bundle")
            except ArtifactError:
                found = signed = NOTHING
            else:
                found, signed = files.manifest.device, (files.signature or b"").decode()
                assert files.verify() == [], f"cut {disk.cuts}, {state}"
            assert found in monitor.allowed["bundle"], f"cut {disk.cuts}, {state}"
            assert signed in monitor.allowed["signature"], f"cut {disk.cuts}, {state}"
            shutil.rmtree(folder)

    disk = Disk(root, cut)
    monitor.allowed = {"bundle": {NOTHING}, "signature": {NOTHING}}
    with disk.watching():
        store = Store(root / "store")
        paths = {DIGESTS[name]: store.path(store.put_bytes(data)) for name, data in CONTENT.items()}
        for device in ("old", "new"):
            monitor.may_become("bundle", device)
            write_bundle(root / "out" / "bundle", manifest(device=device), paths)
            monitor.is_now("bundle", device)
        monitor.may_become("signature", "signed")
        write_signature(root / "out" / "bundle", b"signed")
        monitor.is_now("signature", "signed")
        store.put_bytes(b"one more")
    assert disk.cuts > 40
