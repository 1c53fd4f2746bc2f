"""Bundles as entries of a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.stored import KIND, add_bundle, bundle_key, read_bundle, remember_bundle
from llmc.artifacts.bundle.writer import write_bundle
from llmc.artifacts.key import Key
from llmc.artifacts.store.entries import Entry
from llmc.artifacts.store.store import Store
from llmc.artifacts.store.workspace import Area
from tests.artifacts.helpers import CONTENT, manifest, sources


def folder(tmp_path: Path, name: str, signature: bytes | None = None) -> BundleFiles:
    return BundleFiles.open(write_bundle(tmp_path / name, manifest(), sources(tmp_path / "model"), signature))


def test_an_unsigned_folder_leaves_the_stores_signature(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    signed = add_bundle(store, folder(tmp_path, "signed", b"{}"))
    assert add_bundle(store, folder(tmp_path, "unsigned")).outputs == signed.outputs
    assert read_bundle(store, signed) == (manifest(), b"{}")


def test_a_signed_folder_brings_its_signature(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    add_bundle(store, folder(tmp_path, "unsigned"))
    for signature in (b"{}", b"[]"):
        entry = add_bundle(store, folder(tmp_path, f"signed-{signature.hex()}", signature))
        assert read_bundle(store, entry) == (manifest(), signature)


class Never:
    """An upstream that nobody may ask."""

    def fetch(self, key: Key, area: Area) -> Entry | None:
        pytest.fail(f"asked for {key.kind}")


def test_a_bundle_that_was_just_built_is_not_requested_elsewhere(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", upstream=Never())
    for content in CONTENT.values():
        store.put_bytes(content)
    remember_bundle(store, manifest())
    assert store.lookup(bundle_key(manifest()), verify=True) is not None


def test_a_bundle_whose_blobs_are_elsewhere_is_not_listed(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    remember_bundle(store, manifest())
    assert store.entries(KIND) == []
