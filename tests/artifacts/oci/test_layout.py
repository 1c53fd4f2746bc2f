"""Images in a folder: what is pushed comes back, what is shared is kept once, and others read it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from llmc.artifacts.atomic_write import UnwritableError
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.stored import bundle_key, read_bundle
from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.oci import image, pull_bundle, push_image
from llmc.artifacts.store.store import Store
from llmc.errors import ArtifactError, CapacityError, InputError
from tests.artifacts.helpers import Faults, files_below, flip
from tests.artifacts.oci.helpers import WEIGHTS, Anyone, Seal, blob_file, make_bundle, pulled, read_layout


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    return tmp_path / "images"


def test_what_is_pushed_is_what_is_pulled(store: Store, layout: Path, tmp_path: Path) -> None:
    entry = make_bundle(store, signature=b'{"by": "me"}')
    report = push_image(store, entry, f"oci-layout:{layout}:v1")
    assert (report.entries, report.skipped_blobs) == (1, 0)
    other = Store(tmp_path / "other")
    trust = Anyone()
    found, report = pull_bundle(other, f"oci-layout:{layout}:v1", trust=trust)
    assert read_bundle(other, found) == read_bundle(store, entry)
    assert (found.key, dict(found.outputs), dict(found.meta)) == (entry.key, dict(entry.outputs), dict(entry.meta))
    assert report.bytes > len(WEIGHTS)
    content = store.get_bytes(entry.outputs["manifest.json"].digest)
    assert trust.requested == [(content, b'{"by": "me"}', False, f"oci-layout:{layout}:v1")]


def test_native_code_is_announced_to_trust(store: Store, layout: Path, tmp_path: Path) -> None:
    push_image(store, make_bundle(store, state="native"), f"oci-layout:{layout}")
    trust = Anyone()
    pull_bundle(Store(tmp_path / "other"), f"oci-layout:{layout}", trust=trust)
    assert [native for _, _, native, _ in trust.requested] == [True]


def test_a_signer_signs_what_is_pushed_and_not_what_is_stored(store: Store, layout: Path, tmp_path: Path) -> None:
    entry = make_bundle(store, signature=b"old")
    push_image(store, entry, f"oci-layout:{layout}", signer=Seal())
    found = BundleFiles.open(pulled(tmp_path, f"oci-layout:{layout}"))
    assert found.signature == Seal().sign(found.manifest.to_bytes(), b"old")
    assert read_bundle(store, entry)[1] == b"old"


def test_a_signature_that_is_here_outlives_a_pull_without_one(store: Store, layout: Path) -> None:
    entry = make_bundle(store)
    push_image(store, entry, f"oci-layout:{layout}")
    make_bundle(store, signature=b"mine")
    found, _ = pull_bundle(store, f"oci-layout:{layout}", trust=Anyone())
    assert read_bundle(store, found)[1] == b"mine"


def test_pushing_twice_moves_nothing_and_gives_the_same_image(store: Store, layout: Path, tmp_path: Path) -> None:
    entry = make_bundle(store)
    push_image(store, entry, f"oci-layout:{layout}:v1")
    before = {path: path.stat().st_mtime_ns for path in files_below(layout)}
    again = push_image(store, entry, f"oci-layout:{layout}:v1")
    assert (again.entries, again.blobs, again.bytes) == (0, 0, 0) and again.skipped_bytes > len(WEIGHTS)
    assert {path: path.stat().st_mtime_ns for path in files_below(layout)} == before
    push_image(store, entry, f"oci-layout:{tmp_path / 'second'}:v1")
    assert (tmp_path / "second" / "index.json").read_bytes() == (layout / "index.json").read_bytes()


def test_a_bundle_that_shares_weights_moves_only_what_differs(store: Store, layout: Path, tmp_path: Path) -> None:
    push_image(store, make_bundle(store), f"oci-layout:{layout}:v1")
    second = make_bundle(store, decode=b"another graph")
    report = push_image(store, second, f"oci-layout:{layout}:v2")
    assert report.bytes < 20_000 and report.skipped_bytes > len(WEIGHTS)
    other = Store(tmp_path / "other")
    pull_bundle(other, f"oci-layout:{layout}:v1", trust=Anyone())
    seen: list[tuple[int, int]] = []
    _, report = pull_bundle(
        other, f"oci-layout:{layout}:v2", trust=Anyone(), progress=lambda *moved: seen.append(moved)
    )
    assert report.bytes < 20_000 and report.skipped_bytes > len(WEIGHTS)
    assert seen[-1][0] == seen[-1][1] > 0


def test_the_image_is_one_that_container_engines_unpack(store: Store, layout: Path) -> None:
    entry = make_bundle(store)
    push_image(store, entry, f"oci-layout:{layout}:v1")
    manifest, config = read_layout(layout)
    assert manifest["artifactType"] == image.ARTIFACT_TYPE and manifest["config"]["mediaType"] == image.CONFIG_TYPE
    assert config["rootfs"]["diff_ids"] == [layer["digest"] for layer in manifest["layers"]]
    assert (config["os"], config["architecture"], config["created"]) == ("linux", "amd64", "1970-01-01T00:00:00Z")
    assert manifest["annotations"]["dev.llmc.model"] == "tiny" and manifest["annotations"]["dev.llmc.device"] == "cpu"
    assert json.loads((layout / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    weights = manifest["layers"][0]
    assert weights["size"] > len(WEIGHTS) and weights["mediaType"] == "application/vnd.oci.image.layer.v1.tar"


def test_the_image_of_a_bundle_never_changes(store: Store, layout: Path) -> None:
    push_image(store, make_bundle(store), f"oci-layout:{layout}:v1")
    manifest, _ = read_layout(layout)
    found = [layer["digest"][7:19] for layer in manifest["layers"]]
    assert found == ["639c6f2860a7", "1c0036ba01a4", "ac88eca024c9", "ab4d1d9e787f", "f22084c7b0b4"]
    image_digest = json.loads((layout / "index.json").read_bytes())["manifests"][0]["digest"]
    assert image_digest == "sha256:6811eab3972cc7dbeeeb085fb1ebe8d259dd89ba605e4319751196fcfc34ff31"


def test_tags_and_digests_name_images(store: Store, layout: Path, tmp_path: Path) -> None:
    first, second = make_bundle(store), make_bundle(store, decode=b"another graph")
    push_image(store, first, f"oci-layout:{layout}:v1")
    push_image(store, second, f"oci-layout:{layout}")
    index = json.loads((layout / "index.json").read_bytes())["manifests"]
    digests = {item["annotations"]["org.opencontainers.image.ref.name"]: item["digest"] for item in index}
    assert set(digests) == {"v1", "latest"}

    def key(version: str) -> str:
        return pull_bundle(Store(tmp_path / "other"), f"oci-layout:{layout}{version}", trust=Anyone())[0].key.digest

    assert key(":v1") == key(f"@{digests['v1']}") == first.key.digest
    assert key("") == key(":latest") == second.key.digest
    for missing in (":v2", "@sha256:" + "0" * 64):
        with pytest.raises(ArtifactError, match="no such bundle"):
            key(missing)
    assert push_image(store, first, f"oci-layout:{layout}@{digests['v1']}").blobs == 0
    with pytest.raises(InputError, match="push it to a tag"):
        push_image(store, first, f"oci-layout:{layout}@{digests['latest']}")


def test_a_tag_moves_to_what_is_pushed_last(store: Store, layout: Path, tmp_path: Path) -> None:
    push_image(store, make_bundle(store), f"oci-layout:{layout}:v1")
    second = make_bundle(store, decode=b"another graph")
    push_image(store, second, f"oci-layout:{layout}:v1")
    assert len(json.loads((layout / "index.json").read_bytes())["manifests"]) == 1
    found, _ = pull_bundle(Store(tmp_path / "other"), f"oci-layout:{layout}:v1", trust=Anyone())
    assert found.key == second.key


def test_what_others_put_into_the_index_stays(store: Store, layout: Path) -> None:
    push_image(store, make_bundle(store), f"oci-layout:{layout}:v1")
    index = json.loads((layout / "index.json").read_bytes())
    foreign = {"mediaType": "x/y", "digest": "sha256:" + "1" * 64, "size": 1, "annotations": {"a": "b"}}
    index = {**index, "manifests": [foreign, *index["manifests"]], "annotations": {"c": "d"}}
    (layout / "index.json").write_text(json.dumps(index))
    push_image(store, make_bundle(store, decode=b"another graph"), f"oci-layout:{layout}:v2")
    after = json.loads((layout / "index.json").read_bytes())
    assert after["manifests"][0] == foreign and after["annotations"] == {"c": "d"} and len(after["manifests"]) == 3


def test_pushing_again_mends_a_damaged_layout(store: Store, layout: Path, tmp_path: Path) -> None:
    entry = make_bundle(store)
    push_image(store, entry, f"oci-layout:{layout}:v1")
    for path in files_below(layout / "blobs"):
        flip(path)
    assert push_image(store, entry, f"oci-layout:{layout}:v1").skipped_blobs == 0
    pulled(tmp_path, f"oci-layout:{layout}:v1")


def test_pulling_again_mends_a_damaged_store(store: Store, layout: Path) -> None:
    entry = make_bundle(store)
    push_image(store, entry, f"oci-layout:{layout}:v1")
    weights = store.path(digest_bytes(WEIGHTS))
    flip(weights)
    _, report = pull_bundle(store, f"oci-layout:{layout}:v1", trust=Anyone())
    assert report.bytes > len(WEIGHTS) and store.get_bytes(digest_bytes(WEIGHTS)) == WEIGHTS


def test_a_damaged_bundle_is_not_pushed(store: Store, layout: Path) -> None:
    entry = make_bundle(store)
    flip(store.path(digest_bytes(WEIGHTS)))
    with pytest.raises(ArtifactError, match="missing"):
        push_image(store, entry, f"oci-layout:{layout}:v1")
    assert not (layout / "index.json").exists()


def test_a_folder_with_other_things_is_left_alone(store: Store, layout: Path) -> None:
    layout.mkdir()
    (layout / "holiday.jpg").write_bytes(b"")
    with pytest.raises(ArtifactError, match="neither empty nor an image layout"):
        push_image(store, make_bundle(store), f"oci-layout:{layout}")
    assert [path.name for path in files_below(layout)] == ["holiday.jpg"]


def test_a_layout_that_is_not_there_is_said_to_be_missing(store: Store, layout: Path) -> None:
    with pytest.raises(ArtifactError, match="no such bundle"):
        pull_bundle(store, f"oci-layout:{layout}:v1", trust=Anyone())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"manifests": 5}', '{"manifests": [5]}', "[" * 100_000])
def test_a_torn_index_is_an_error_and_is_not_overwritten(store: Store, layout: Path, text: str) -> None:
    entry = make_bundle(store)
    push_image(store, entry, f"oci-layout:{layout}:v1")
    (layout / "index.json").write_text(text)
    for act in (
        lambda: pull_bundle(store, f"oci-layout:{layout}:v1", trust=Anyone()),
        lambda: push_image(store, entry, f"oci-layout:{layout}:v2"),
    ):
        with pytest.raises(ArtifactError, match=r"index\.json"):
            act()
    assert (layout / "index.json").read_text() == text


def test_a_pipe_in_a_layout_is_not_waited_for(store: Store, layout: Path) -> None:
    push_image(store, make_bundle(store), f"oci-layout:{layout}:v1")
    manifest, _ = read_layout(layout)
    for path in (blob_file(layout, manifest["layers"][-1]["digest"]), layout / "index.json"):
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(ArtifactError, match="not a"):
            pull_bundle(store, f"oci-layout:{layout}:v1", trust=Anyone())


@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize(("call", "code"), [("write", errno.ENOSPC), ("fsync", errno.EIO), ("rename", errno.EIO)])
def test_a_full_or_broken_disk_leaves_no_part_of_an_image(
    store: Store, layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, after: int
) -> None:
    push_image(store, make_bundle(store, weights=b"small"), f"oci-layout:{layout}:v1")
    index = (layout / "index.json").read_bytes()
    entry = make_bundle(store, decode=b"another graph")
    with monkeypatch.context() as patch:
        Faults(patch, layout).inject(call, code, after=after)
        with pytest.raises(CapacityError, match="images"):
            push_image(store, entry, f"oci-layout:{layout}:v2", jobs=1)
    assert (layout / "index.json").read_bytes() == index
    assert not list(layout.glob(".*.new"))
    push_image(store, entry, f"oci-layout:{layout}:v2")
    pulled(tmp_path, f"oci-layout:{layout}:v2")


def test_a_layout_that_cannot_be_written_is_an_error(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UnwritableError):
        push_image(store, make_bundle(store), f"oci-layout:{tmp_path / 'file'}")


def test_only_bundles_are_pushed(store: Store, layout: Path) -> None:
    from tests.artifacts.helpers import key

    blob = store.put_bytes(b"x")
    with pytest.raises(ArtifactError, match="neither a bundle nor a packed cache"):
        push_image(store, store.publish(key(), {"x": blob}), f"oci-layout:{layout}")


def test_the_key_of_what_is_pulled_is_the_manifests(store: Store, layout: Path, tmp_path: Path) -> None:
    push_image(store, make_bundle(store), f"oci-layout:{layout}")
    found, _ = pull_bundle(Store(tmp_path / "other"), f"oci-layout:{layout}", trust=Anyone())
    assert found.key == bundle_key(BundleFiles.open(pulled(tmp_path, f"oci-layout:{layout}")).manifest)
