from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.artifacts.bundle.manifest import MAX_BYTES, Manifest, flat_components, manifest_components, read_manifest
from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import differences
from llmc.errors import ArtifactError
from tests.artifacts.helpers import CONTENT, DIGESTS, manifest
from tests.tiers import examples


def written(folder: Path, data: bytes) -> Path:
    (folder / "manifest.json").write_bytes(data)
    return folder


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    built = manifest()
    read = read_manifest(written(tmp_path, built.to_bytes()))
    assert read == built
    assert read.to_bytes() == built.to_bytes()
    assert (read.digest, hash(read)) == (built.digest, hash(built))
    assert read_manifest(tmp_path / "manifest.json") == built
    assert read.source == str(tmp_path / "manifest.json")


def test_its_members_are_attributes() -> None:
    built = manifest()
    assert (built.llmc, built.device, built.target, built.executor) == (
        "0.1.0",
        "cpu",
        "onnxruntime",
        "onnxruntime",
    )
    assert built.model == {"name": "tiny", "layers": 2}
    assert built.options == {"threads": 2, "ratio": 0.5}
    assert built.toolchain == {"onnxruntime": "1.31.1"}
    assert built.isa == ("avx2",)
    assert built.summary == {"executables": 2}
    assert built.verification == built.provenance == {}
    assert built.plan["schema"] == 1
    assert built.size == sum(map(len, CONTENT.values()))
    assert [str(item) for item in built.executables] == [
        "prefill batch=4 context=2048",
        "decode batch=4 context=2048",
    ]
    assert built.executables[1].blob == DIGESTS["decode"]


def test_the_order_of_members_does_not_matter() -> None:
    members = manifest().to_dict()
    turned = dict(reversed(members.items()))
    assert Manifest(turned).to_bytes() == Manifest(members).to_bytes()


def test_members_of_later_versions_are_kept() -> None:
    built = manifest(notes={"signed": True})
    assert Manifest.from_bytes(built.to_bytes()).to_dict()["notes"] == {"signed": True}


def test_a_manifest_does_not_change_with_what_it_was_built_from() -> None:
    model = {"name": "tiny"}
    built = manifest(model=model)
    model["name"] = "other"
    assert built.model == {"name": "tiny"}


def test_a_blob_has_its_uses_in_words() -> None:
    assert manifest().use_of(DIGESTS["weights"]) == "weights.bin"
    assert manifest().use_of(DIGESTS["decode"]) == "executable decode batch=4 context=2048"
    assert manifest().use_of("sha256:" + "0" * 64) == "listed under blobs"


def test_what_cannot_be_json_is_refused() -> None:
    for value in (object(), float("nan"), {1: {2}}):
        with pytest.raises(ArtifactError, match="JSON"):
            manifest(summary={"x": value})


# Reading what is not a manifest


def test_what_is_not_a_bundle_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "folder" / "manifest.json").mkdir(parents=True)
    for name, problem in (("nothing", "no such"), ("model", "no manifest.json"), ("folder", "regular file")):
        with pytest.raises(ArtifactError, match=problem) as caught:
            read_manifest(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
    with pytest.raises(ArtifactError, match=r"cannot be read|no such"):
        read_manifest("a\0b")


def test_devices_and_pipes_are_not_read(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "manifest.json")
    for path in (tmp_path, "/dev/zero"):
        with pytest.raises(ArtifactError, match="regular file"):
            read_manifest(path)


Change = Callable[[dict[str, Any]], object]


def executable(**members: object) -> Change:
    return lambda data: data["executables"][1].update(members)


WRONG: dict[str, tuple[Change, str]] = {
    "kind": (lambda data: data.update(kind="zip"), "kind"),
    "no kind": (lambda data: data.pop("kind"), "kind"),
    "schema missing": (lambda data: data.pop("schema"), "'schema'"),
    "schema as text": (lambda data: data.update(schema="1"), "'schema'"),
    "schema true": (lambda data: data.update(schema=True), "'schema'"),
    "schema newer": (lambda data: data.update(schema=2), "newer.*upgrade llmc"),
    "schema older": (lambda data: data.update(schema=0), "older.*llmc compile"),
    "device": (lambda data: data.update(device=3), "'device'"),
    "no executor": (lambda data: data.pop("executor"), "'executor'"),
    "plan": (lambda data: data.update(plan=[]), "'plan'"),
    "toolchain": (lambda data: data.update(toolchain={"a": 1}), "toolchain"),
    "isa": (lambda data: data.update(isa=[1]), "'isa'"),
    "no blobs": (lambda data: data.pop("blobs"), "'blobs'"),
    "blobs": (lambda data: data.update(blobs=[]), "'blobs'"),
    "blob name": (lambda data: data["blobs"].update({"../../etc/passwd": 1}), "etc/passwd"),
    "blob name, case": (lambda data: data["blobs"].update({"sha256:" + "A" * 64: 1}), "digest"),
    "negative size": (lambda data: data["blobs"].update({DIGESTS["decode"]: -1}), DIGESTS["decode"]),
    "size as float": (lambda data: data["blobs"].update({DIGESTS["decode"]: 1.0}), "integer"),
    "size as bool": (lambda data: data["blobs"].update({DIGESTS["decode"]: True}), "integer"),
    "huge size": (lambda data: data["blobs"].update({DIGESTS["decode"]: 1 << 60}), "integer"),
    "files": (lambda data: data.update(files=None), "'files'"),
    "file name up": (lambda data: data["files"].update({"../x": DIGESTS["decode"]}), "plain file name"),
    "file name dots": (lambda data: data["files"].update({"..": DIGESTS["decode"]}), "plain file name"),
    "file name root": (lambda data: data["files"].update({"/etc/x": DIGESTS["decode"]}), "plain file name"),
    "file name hidden": (
        lambda data: data["files"].update({".bashrc": DIGESTS["decode"]}),
        "plain file name",
    ),
    "file name nul": (lambda data: data["files"].update({"a\0": DIGESTS["decode"]}), "plain file name"),
    "file of no blob": (lambda data: data["files"].update(x=digest_bytes(b"?")), "not in 'blobs'"),
    "file of no digest": (lambda data: data["files"].update(x="decode"), "files.'x'.*digest"),
    "executables": (lambda data: data.update(executables={}), "'executables'"),
    "executable": (lambda data: data["executables"].append([]), r"executables\[2\]"),
    "phase": (executable(phase=""), r"executables\[1\].phase"),
    "batch": (executable(batch=-1), r"executables\[1\].batch"),
    "query": (executable(query="8"), r"executables\[1\].query"),
    "context": (executable(context=1.5), r"executables\[1\].context"),
    "state": (executable(state="broken"), r"executables\[1\].state"),
    "buckets": (executable(buckets=None), r"executables\[1\].buckets"),
    "blob": (executable(blob="../x"), r"executables\[1\].blob"),
    "blob not listed": (executable(blob=digest_bytes(b"?")), r"executables\[1\].blob.*not in 'blobs'"),
    "key": (executable(key=None), r"executables\[1\].key"),
    "half a character": (lambda data: data.update(device="\ud800"), "surrogates"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_with_its_file(tmp_path: Path, name: str) -> None:
    change, problem = WRONG[name]
    data = manifest().to_dict()
    change(data)
    with pytest.raises(ArtifactError, match=problem) as caught:
        read_manifest(written(tmp_path, json.dumps(data).encode()))
    assert str(tmp_path / "manifest.json") in str(caught.value)


BOMBS = {
    "empty": b"",
    "list": b"[]",
    "nested": b"[" * 1_000_000,
    "nested object": b'{"a":' * 100_000,
    "long number": b'{"schema": ' + b"9" * 100_000 + b"}",
    "infinity": b'{"schema": 1e999}',
    "NaN": b'{"schema": NaN}',
    "twice": b'{"schema": 1, "schema": 1}',
    "not UTF-8": b'{"kind": "\xff"}',
    "pickle": b"\x80\x04\x95\x00",
}


@pytest.mark.parametrize("name", BOMBS)
def test_hostile_json_is_an_artifact_error(name: str) -> None:
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        Manifest.from_bytes(BOMBS[name])


def test_a_huge_manifest_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(MAX_BYTES + 1000)
    with pytest.raises(ArtifactError, match="larger than"):
        read_manifest(tmp_path)


def check_fuzz(data: bytes) -> None:
    try:
        read = Manifest.from_bytes(data)
    except ArtifactError:
        return
    assert Manifest.from_bytes(read.to_bytes()) == read
    manifest_components(read)
    repr(read)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@examples(150)
@given(st.binary())
def test_any_bytes_are_a_manifest_or_an_artifact_error(data: bytes) -> None:
    check_fuzz(data)


@examples(150)
@given(st.sampled_from(sorted(manifest().to_dict())), JSON)
def test_any_json_in_any_member_is_a_manifest_or_an_artifact_error(name: str, value: object) -> None:
    check_fuzz(json.dumps({**manifest().to_dict(), name: value}).encode())


@examples(100)
@given(st.sampled_from(["executables", "files", "blobs"]), st.data())
def test_any_json_inside_the_tables_is_a_manifest_or_an_artifact_error(table: str, data: st.DataObject) -> None:
    members = manifest().to_dict()
    target = members[table][0] if table == "executables" else members[table]
    name = data.draw(st.sampled_from(sorted(target)) | st.text(), "name")
    target[name] = data.draw(JSON | st.sampled_from(sorted(DIGESTS.values())), "value")
    check_fuzz(json.dumps(members).encode())


@examples(150)
@given(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=4))
def test_any_altered_byte_is_a_manifest_or_an_artifact_error(where: float, change: bytes) -> None:
    raw = bytearray(manifest().to_bytes())
    at = int(where * len(raw))
    raw[at : at + len(change)] = change
    check_fuzz(bytes(raw))


# Comparing


def test_two_bundles_differ_in_named_components() -> None:
    other = manifest(toolchain={"onnxruntime": "1.30.0"}, options={"threads": 4, "ratio": 0.5}, isa="avx512")
    found = differences(manifest_components(manifest()), manifest_components(other))
    assert list(found) == [
        ("isa", "avx2", "avx512"),
        ("options.threads", 2, 4),
        ("toolchain.onnxruntime", "1.31.1", "1.30.0"),
    ]


def test_how_a_bundle_came_to_be_does_not_make_it_differ() -> None:
    other = manifest(provenance={"host": "ci-7"}, summary={}, verification={"state": "passed"})
    assert list(differences(manifest_components(manifest()), manifest_components(other))) == []


def test_members_alone_have_the_names_that_a_manifest_s_components_have() -> None:
    members = {"options": {"threads": 4, "deep": {"er": "x"}}, "plan": None, "isa": "avx2"}
    assert flat_components(members) == {"options.threads": 4, "options.deep.er": "x", "plan": None, "isa": "avx2"}
    of_one = manifest_components(one := manifest())
    assert flat_components({"options": one.options}).items() <= of_one.items()
