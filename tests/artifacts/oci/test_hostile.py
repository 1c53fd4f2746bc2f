"""Images from anywhere: whatever is wrong with one, nothing but the bundle that its manifest says comes of it."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import tempfile
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.stored import checkout
from llmc.artifacts.bundle.trust import UntrustedError
from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.oci import image, pull_bundle, push_image
from llmc.artifacts.oci.base import verified
from llmc.artifacts.store.store import Store
from llmc.errors import ArtifactError
from tests.artifacts.helpers import files_below, flip, truncate
from tests.artifacts.oci.helpers import WEIGHTS, Anyone, Nobody, blob_file, forge, make_bundle, pulled, true_archives
from tests.tiers import examples


@pytest.fixture
def archives(tmp_path: Path) -> list[bytes]:
    """The true layers of a bundle; the first is that of the weights, the last has the manifest."""
    store = Store(tmp_path / "source")
    return true_archives(store, make_bundle(store))


def refused(tmp_path: Path, reference: str, match: str | None = None) -> None:
    store = Store(tempfile.mkdtemp(dir=tmp_path))
    with pytest.raises(ArtifactError, match=match) as caught:
        pull_bundle(store, reference, trust=Anyone())
    assert "\n" not in str(caught.value)
    assert store.entries() == []
    assert not list(store.layout.temporaries.glob("*"))


def zipped(archives: list[bytes]) -> list[bytes]:
    return [gzip.compress(data, mtime=0) for data in archives]


def test_an_image_built_by_hand_as_it_should_be_is_pulled(tmp_path: Path, archives: list[bytes]) -> None:
    pulled(tmp_path, forge(tmp_path / "images", archives))


def test_layers_that_a_tool_compressed_are_read(tmp_path: Path, archives: list[bytes]) -> None:
    reference = forge(
        tmp_path / "images",
        archives,
        files=zipped(archives),
        media_type=image.GZIP_TYPE,
        artifactType=image.ARTIFACT_TYPE,
    )
    pulled(tmp_path, reference)


def member(change: Callable[[tarfile.TarInfo], None], content: bytes = WEIGHTS) -> bytes:
    """A layer made by tarfile, as the first one but for one change."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in image.FOLDERS:
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o555
            archive.addfile(folder)
        info = tarfile.TarInfo(image.FOLDERS[-1] + digest_bytes(WEIGHTS)[7:])
        info.size, info.mode = len(content), 0o444
        change(info)
        archive.addfile(info, io.BytesIO(content) if info.isreg() else None)
    return file.getvalue()


def as_type(kind: bytes) -> Callable[[tarfile.TarInfo], None]:
    def change(info: tarfile.TarInfo) -> None:
        info.type, info.linkname = kind, "/etc/passwd"

    return change


def named(name: str) -> Callable[[tarfile.TarInfo], None]:
    return lambda info: setattr(info, "name", name)


WRONG_MEMBERS = {
    "parent": named("blobs/sha256/../../../evil"),
    "absolute": named("/etc/evil"),
    "other blob": named("blobs/sha256/" + "0" * 64),
    "hard link": as_type(tarfile.LNKTYPE),
    "symbolic link": as_type(tarfile.SYMTYPE),
    "device": as_type(tarfile.CHRTYPE),
    "pipe": as_type(tarfile.FIFOTYPE),
    "sparse": as_type(tarfile.GNUTYPE_SPARSE),
    "set-uid": lambda info: setattr(info, "mode", 0o4755),
    "pax path": lambda info: info.pax_headers.update(path="/etc/evil"),
    "owner": lambda info: setattr(info, "uname", "root"),
}


@pytest.mark.parametrize("name", WRONG_MEMBERS)
def test_a_layer_with_anything_but_the_blob_is_refused(tmp_path: Path, archives: list[bytes], name: str) -> None:
    archives[0] = member(WRONG_MEMBERS[name])
    stored = forge(tmp_path / "images", archives, files=zipped(archives), media_type=image.GZIP_TYPE)
    refused(tmp_path, stored, "not a layer of a bundle")


def test_a_layer_with_other_content_of_the_same_size_is_refused(tmp_path: Path, archives: list[bytes]) -> None:
    archives[0] = archives[0].replace(b"weights", b"WEIGHTS")
    refused(tmp_path, forge(tmp_path / "images", archives), "damaged, it has digest")


def test_a_layer_that_holds_a_blob_twice_is_refused(tmp_path: Path, archives: list[bytes]) -> None:
    archives[0] = archives[0][:-1024] + archives[0][1024:]
    refused(tmp_path, forge(tmp_path / "images", archives), "the bundle's manifest requires")
    stored = forge(tmp_path / "zipped", archives, files=zipped(archives), media_type=image.GZIP_TYPE)
    refused(tmp_path, stored, "its end was expected")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda found: found[1:], "requires"),
        (lambda found: [*found[:1], *found], "requires"),
        (lambda found: found[:-1], "last layer|not a layer"),
        (lambda found: [found[1], found[0], *found[2:]], "requires"),
        (lambda found: [image.write_facts(b"", None)], "JSON"),
        (lambda found: [*found[:-1], found[-1].replace(b'"device": "cpu"', b'"device":"cpu" ')], "as llmc writes"),
        (lambda found: [*found[:-1], bytes(1024)], "has no manifest"),
        (lambda found: [found[-1]], "requires"),
    ],
)
def test_layers_that_are_not_those_of_the_manifest_are_refused(
    tmp_path: Path, archives: list[bytes], change: Callable[[list[bytes]], list[bytes]], match: str
) -> None:
    refused(tmp_path, forge(tmp_path / "images", change(archives)), match)


@pytest.mark.parametrize(
    "changes",
    [
        {"artifactType": "application/vnd.other"},
        {"mediaType": "application/vnd.oci.image.index.v1+json"},
        {"mediaType": ["x"]},
        {"schemaVersion": 1},
        {"layers": []},
        {"layers": 5},
        {"layers": [5]},
        {"layers": [{"mediaType": image.LAYER_TYPE, "digest": "sha256:" + "0" * 64, "size": 5}] * 128},
        {"layers": [{"mediaType": image.LAYER_TYPE, "digest": "../../etc/passwd", "size": 5}]},
        {"layers": [{"mediaType": image.LAYER_TYPE, "digest": "sha256:" + "0" * 64, "size": -1}]},
        {"layers": [{"mediaType": image.LAYER_TYPE, "digest": "sha256:" + "0" * 64, "size": 1 << 60}]},
        {"layers": [{"mediaType": image.LAYER_TYPE, "digest": "sha256:" + "0" * 64, "size": True}]},
        {"layers": [{"mediaType": image.LAYER_TYPE, "digest": "sha256:" + "0" * 64, "size": 1 << 40}]},
        {"layers": [{"mediaType": "application/x-sh", "digest": "sha256:" + "0" * 64, "size": 5}]},
        {"layers": [{"mediaType": [], "digest": [], "size": []}]},
        {"config": None},
        {"config": {"mediaType": "application/vnd.oci.empty.v1+json", "digest": "sha256:" + "0" * 64, "size": 2}},
    ],
)
def test_an_image_manifest_that_says_nonsense_is_refused(
    tmp_path: Path, archives: list[bytes], changes: dict[str, Any]
) -> None:
    refused(tmp_path, forge(tmp_path / "images", archives, **changes))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"rootfs": 5},
        {"rootfs": {"diff_ids": []}},
        {"rootfs": {"diff_ids": ["sha256:" + "0" * 64] * 5}},
        {"rootfs": {"diff_ids": [5] * 5}},
    ],
)
def test_a_config_that_lies_is_refused(tmp_path: Path, archives: list[bytes], config: dict[str, Any]) -> None:
    refused(tmp_path, forge(tmp_path / "images", archives, reported=config), "config")


def test_a_compressed_layer_that_is_not_what_the_config_says_is_refused(tmp_path: Path, archives: list[bytes]) -> None:
    config = {"rootfs": {"diff_ids": [digest_bytes(data) for data in archives]}}
    wrong = [archives[0][:-1] + b"\0", *archives[1:]]
    for files, match in (
        ([b"not gzip", *zipped(archives)[1:]], "not a gzip file"),
        ([zipped(wrong)[0][:-9], *zipped(archives)[1:]], "ends early|not sha256"),
        ([zipped(archives)[0] + b"more", *zipped(archives)[1:]], "data follows"),
    ):
        stored = forge(tmp_path / "images", archives, files=files, media_type=image.GZIP_TYPE, reported=config)
        refused(tmp_path, stored, match)
    config["rootfs"]["diff_ids"][0] = "sha256:" + "0" * 64
    stored = forge(tmp_path / "images", archives, files=zipped(archives), media_type=image.GZIP_TYPE, reported=config)
    refused(tmp_path, stored, "which the config names")


@pytest.mark.parametrize("location", [0, -1])
def test_a_bomb_is_not_inflated(tmp_path: Path, archives: list[bytes], location: int) -> None:
    squeeze = zlib.compressobj(wbits=31)
    files = zipped(archives)
    files[location] = b"".join([*(squeeze.compress(bytes(1 << 20)) for _ in range(100)), squeeze.flush()])
    stored = forge(tmp_path / "images", archives, files=files, media_type=image.GZIP_TYPE)
    tracemalloc.start()
    try:
        refused(tmp_path, stored)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_nothing_is_fetched_of_what_is_not_trusted(tmp_path: Path) -> None:
    source = Store(tmp_path / "source")
    push_image(source, make_bundle(source), f"oci-layout:{tmp_path / 'images'}")
    largest = max(files_below(tmp_path / "images"), key=lambda path: path.stat().st_size)
    largest.unlink()
    store = Store(tmp_path / "other")
    with pytest.raises(UntrustedError):
        pull_bundle(store, f"oci-layout:{tmp_path / 'images'}", trust=Nobody())
    assert not store.root.exists()


def test_damage_anywhere_in_a_layout_never_gives_a_wrong_bundle(tmp_path: Path) -> None:
    source = Store(tmp_path / "source")
    entry = make_bundle(source, signature=b"{}")
    reference = f"oci-layout:{tmp_path / 'images'}:v1"
    for damage in (flip, truncate, Path.unlink):
        for path in files_below(tmp_path / "images") or [tmp_path]:
            push_image(source, entry, reference)
            if not path.is_file() or path.stat().st_size == 0:
                continue
            kept = path.read_bytes()
            damage(path)
            store = Store(tmp_path / "other")
            try:
                found, _ = pull_bundle(store, reference, trust=Anyone())
            except ArtifactError:
                assert store.entries() == []
            else:
                assert found.key == entry.key
                assert BundleFiles.open(checkout(store, found)).verify() == []
            path.unlink(missing_ok=True)
            path.write_bytes(kept)
            for left in files_below(store.root):
                left.unlink()


@pytest.mark.parametrize("data", [b"conten", b"contents", b"CONTENT", b""])
def test_a_blob_is_its_bytes_and_no_others(data: bytes) -> None:
    blob = image.describe(image.LAYER_TYPE, b"content")
    assert b"".join(verified([b"con", b"tent"], blob, "x")) == b"content"
    with pytest.raises(ArtifactError, match=blob.digest):
        list(verified([data], blob, "x"))


def test_no_byte_beyond_a_blobs_size_is_passed_on() -> None:
    passed = []
    with pytest.raises(ArtifactError, match="larger than the 7 bytes"):
        for piece in verified([b"content"] * 1000, image.describe(image.LAYER_TYPE, b"content"), "x"):
            passed.append(piece)
    assert passed == [b"content"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)
DESCRIPTOR = st.fixed_dictionaries(
    {},
    optional={
        "mediaType": st.sampled_from([image.LAYER_TYPE, image.CONFIG_TYPE, image.GZIP_TYPE]) | JSON,
        "digest": st.just("sha256:" + "0" * 64) | JSON,
        "size": st.integers() | JSON,
    },
)


@given(
    st.fixed_dictionaries(
        {"schemaVersion": st.just(2) | JSON},
        optional={"mediaType": st.just(image.MANIFEST_TYPE) | JSON, "artifactType": JSON, "config": DESCRIPTOR | JSON,
                  "layers": st.lists(DESCRIPTOR | JSON, max_size=3) | JSON},
    )
    | JSON
)  # fmt: skip
def test_reading_any_manifest_raises_nothing_but_artifact_error(document: object) -> None:
    for read in (lambda data: image.read_image(data, "x"), lambda data: image.read_diff_ids(data, 2, "x")):
        with suppress(ArtifactError):
            read(json.dumps(document).encode())


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300), where=st.sampled_from(["index.json", "manifest", "config", "facts"]))
def test_garbage_in_place_of_any_document_is_refused(tmp_path: Path, data: bytes, where: str) -> None:
    folder = tmp_path / "garbage"
    facts = data if where == "facts" else b"{}"
    reference = forge(folder, [facts])
    index = json.loads((folder / "index.json").read_bytes())
    blob = blob_file(folder, index["manifests"][0]["digest"])
    if where == "index.json":
        (folder / "index.json").write_bytes(data)
    elif where == "manifest":
        blob.write_bytes(data)
    elif where == "config":
        blob_file(folder, json.loads(blob.read_bytes())["config"]["digest"]).write_bytes(data)
    with pytest.raises(ArtifactError):
        pull_bundle(Store(tmp_path / "refused"), reference, trust=Anyone())
