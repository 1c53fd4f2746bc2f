"""Damage to a bundle: what is read is right, or an ArtifactError; a store puts a folder right again (P3, P4)."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import pytest

from llmc.artifacts.bundle.manifest import CHECKSUM_NAME, FILE_NAME, SIGNATURE_NAME
from llmc.artifacts.bundle.reader import BundleFiles, blob_path
from llmc.artifacts.bundle.stored import add_bundle, checkout
from llmc.artifacts.bundle.writer import write_bundle, write_signature
from llmc.artifacts.store.store import Store
from llmc.artifacts.verified_files import FILE_NAME as STAMPS_NAME
from llmc.errors import ArtifactError
from tests.artifacts.faults.test_damage import DAMAGE, REGION, STAND_INS, flips
from tests.artifacts.helpers import CONTENT, DIGESTS, manifest, overwrite, sources


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle", manifest(), sources(tmp_path / "sources", mode=0o644))


@pytest.mark.parametrize("name", CONTENT)
@pytest.mark.parametrize("damage", DAMAGE)
def test_every_region_of_a_blob_is_checked_when_it_is_read(bundle: Path, name: str, damage: str) -> None:
    path = blob_path(bundle, DIGESTS[name])
    for index in range(0, len(CONTENT[name]), REGION):
        wrong = DAMAGE[damage](CONTENT[name], index)
        if wrong == CONTENT[name]:
            continue
        overwrite(path, wrong)
        files = BundleFiles.open(bundle)
        for read in (files.read, files.path):
            with pytest.raises(ArtifactError):
                read(DIGESTS[name])
        assert len(files.verify()) == 1


@pytest.mark.parametrize("name", [FILE_NAME, CHECKSUM_NAME])
def test_no_flipped_bit_in_a_manifest_or_its_checksum_goes_unnoticed(bundle: Path, name: str) -> None:
    data = (bundle / name).read_bytes()
    for _, flipped in islice(flips(data), 0, None, 37 if name == FILE_NAME else 1):
        (bundle / name).write_bytes(flipped)
        with pytest.raises(ArtifactError):
            BundleFiles.open(bundle)


def test_without_a_checksum_a_flipped_bit_in_a_manifest_is_an_error_or_another_word(bundle: Path) -> None:
    """What it names has the digest by which it is named, whatever it says."""
    (bundle / CHECKSUM_NAME).unlink()
    data = (bundle / FILE_NAME).read_bytes()
    contents = {DIGESTS[name]: content for name, content in CONTENT.items()}
    for name, flipped in islice(flips(data), 0, None, 37):
        (bundle / FILE_NAME).write_bytes(flipped)
        try:
            files = BundleFiles.open(bundle)
            for digest in files.manifest.blobs:
                assert files.read(digest) == contents[digest], name
        except ArtifactError:
            continue


def test_a_manifest_that_is_cut_off_is_an_error(bundle: Path) -> None:
    data = (bundle / FILE_NAME).read_bytes()
    for size in range(0, len(data) - 1, 17):
        for torn in (data[:size], data[:size] + bytes(len(data) - size)):
            (bundle / FILE_NAME).write_bytes(torn)
            with pytest.raises(ArtifactError):
                BundleFiles.open(bundle)


@pytest.mark.parametrize("location", range(0, 1600, 199))
def test_a_folder_of_a_store_whose_manifest_was_altered_is_put_right(
    tmp_path: Path, bundle: Path, location: int
) -> None:
    store = Store(tmp_path / "store")
    entry = add_bundle(store, BundleFiles.open(bundle))
    folder = checkout(store, entry)
    overwrite(folder / FILE_NAME, DAMAGE["flipped"](manifest().to_bytes(), location))
    assert BundleFiles.open(checkout(store, entry)).manifest == manifest()


@pytest.mark.parametrize("stand_in", STAND_INS)
@pytest.mark.parametrize("name", [FILE_NAME, CHECKSUM_NAME, SIGNATURE_NAME, STAMPS_NAME, "blob"])
def test_whatever_stands_in_the_place_of_a_file_is_an_error_and_is_written_anew(
    tmp_path: Path, bundle: Path, no_waiting: None, name: str, stand_in: str
) -> None:
    write_signature(bundle, b"{}")
    path = blob_path(bundle, DIGESTS["decode"]) if name == "blob" else bundle / name
    path.unlink(missing_ok=True)
    STAND_INS[stand_in](path)
    try:
        files = BundleFiles.open(bundle)
        assert files.signature in (b"{}", b"" if os.path.lexists(path) else None) or name == SIGNATURE_NAME
        assert all(files.read(DIGESTS[item]) == content for item, content in CONTENT.items())
        files.close()
    except ArtifactError:
        assert name != STAMPS_NAME
    if name == SIGNATURE_NAME and path.is_dir():
        path.rename(tmp_path / "away")
    assert write_bundle(bundle, manifest(), sources(tmp_path / "sources"), b"{}") == bundle
    again = BundleFiles.open(bundle)
    assert again.verify() == []
    assert again.signature == b"{}"
