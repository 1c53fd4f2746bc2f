"""Golden stores: what released versions wrote is read today, and no format drifts unnoticed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.manifest import Manifest, read_manifest
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.stored import bundle_key, checkout, read_bundle
from llmc.artifacts.digest import Blob, digest_bytes
from llmc.artifacts.key import Key, canonical_json
from llmc.artifacts.oci import pull_bundle, push_image
from llmc.artifacts.oci.archive import export_images, import_archive
from llmc.artifacts.signing.keyring import Keyring
from llmc.artifacts.store.entries import Entry, decode_entry, encode_entry, entry_body
from llmc.artifacts.store.layout import SCHEMA
from llmc.artifacts.store.store import Store
from llmc.errors import ArtifactError
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.llm import BundleLLM
from tests.artifacts.helpers import files_below, flip

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
RELEASED = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
LARGEST = 200_000
TRUST = Keyring(Path("nobody"), allow_unsigned=True)
OWN = {".stamps.json"}
"""Files that reading may write: notes about what was verified here."""


def content(folder: Path) -> dict[str, bytes]:
    """Files by name, without what a running process keeps for itself."""
    own = ("leases/", "locks/", "tmp/")
    names = {path.relative_to(folder).as_posix(): path for path in files_below(folder)}
    return {
        name: path.read_bytes() for name, path in names.items()
        if path.name not in OWN and not any(f"/{part}" in f"/{name}" for part in own)
    }  # fmt: skip


class Golden:
    """A copy of a golden folder, its files as old and as plain as git leaves them, and what must be found in it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = shutil.copytree(GOLDEN / name, folder)
        for path in files_below(folder):
            path.chmod(0o644)
            os.utime(path, (1_000_000_000, 1_000_000_000))
        self.before = content(folder)
        self.expected: dict[str, Any] = json.loads((folder / "expected.json").read_bytes())
        self.store = Store(folder / "store")
        self.keys = [Key(item["kind"], item["components"]) for item in self.expected["entries"]]

    @property
    def bundle(self) -> Path:
        return self.folder / "bundle"


@pytest.fixture(params=RELEASED)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Golden:
    return Golden(request.param, tmp_path / request.param)


def answers(bundle: Path, golden: Golden) -> list[list[int]]:
    prompts = [item["prompt"] for item in golden.expected["answers"]]
    with BundleLLM(bundle) as model:
        built = model.generate(prompts, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
        assert model.compilations == 0
    return [output.outputs[0].token_ids for output in built]


# Every released schema


def test_there_is_a_golden_store_of_todays_schema_and_all_are_small() -> None:
    assert f"v{SCHEMA}" in RELEASED
    assert sum(len(data) for data in content(GOLDEN).values()) < LARGEST * len(RELEASED)


def test_every_key_is_found_with_its_outputs(golden: Golden) -> None:
    for key, item in zip(golden.keys, golden.expected["entries"], strict=True):
        assert key.digest == item["key"]
        entry = golden.store.lookup(key, verify=True)
        assert entry is not None, f"{key.kind} {key.short}"
        assert {name: blob.digest for name, blob in entry.outputs.items()} == item["outputs"]
    assert golden.store.counters["corrupt"] == golden.store.counters["misses"] == 0
    assert {entry.key for entry in golden.store.entries()} == set(golden.keys)


def test_nothing_counts_as_damaged(golden: Golden) -> None:
    report = golden.store.verify()
    assert report.bad == []
    assert report.entries == len(golden.keys) and report.blobs > 0
    with BundleFiles.open(golden.bundle) as files:
        assert files.verify() == []


def test_the_bundle_answers_as_it_did(golden: Golden, tmp_path: Path) -> None:
    wanted = [item["tokens"] for item in golden.expected["answers"]]
    assert answers(golden.bundle, golden) == wanted
    (entry,) = golden.store.entries("bundle")
    manifest, signature = read_bundle(golden.store, entry)
    assert manifest == read_manifest(golden.bundle) and signature is None
    assert answers(checkout(golden.store, entry, tmp_path / "out"), golden) == wanted


def test_what_is_read_is_written_back_to_the_byte(golden: Golden) -> None:
    for key in golden.keys:
        data = golden.store.layout.entry(key.kind, key.hex).read_bytes()
        assert encode_entry(decode_entry(data)) == data
    manifest = read_manifest(golden.bundle)
    assert manifest.to_bytes() == (golden.bundle / "manifest.json").read_bytes()
    assert manifest.digest == golden.expected["bundle"]
    assert bundle_key(manifest) in golden.keys


def test_an_archive_is_read_and_written_again_to_the_byte(golden: Golden, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    ((entry,), _) = import_archive(store, golden.folder / "bundle.tar", trust=TRUST)
    assert read_bundle(store, entry) == (read_manifest(golden.bundle), None)
    export_images(store, [entry], tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == (golden.folder / "bundle.tar").read_bytes()


def test_an_image_is_pulled_and_pushed_again_to_the_byte(golden: Golden, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    entry, _ = pull_bundle(store, f"oci-layout:{golden.folder / 'image'}:v1", trust=TRUST)
    assert read_bundle(store, entry) == (read_manifest(golden.bundle), None)
    push_image(store, entry, f"oci-layout:{tmp_path / 'again'}:v1")
    (tmp_path / "again" / ".index.lock").unlink()
    assert content(tmp_path / "again") == content(golden.folder / "image")


def test_reading_changes_no_file(golden: Golden, tmp_path: Path) -> None:
    golden.store.verify()
    for key in golden.keys:
        golden.store.lookup(key, verify=True)
    answers(golden.bundle, golden)
    assert content(golden.folder) == golden.before


def test_writing_leaves_what_was_there_as_it_was(golden: Golden) -> None:
    entry, hit = golden.store.get_or_build(Key("weights", {"new": 1}), lambda space: {"w": space.put_bytes(b"new")})
    assert not hit
    after = content(golden.folder)
    assert {name: after[name] for name in golden.before} == golden.before
    assert len(after) == len(golden.before) + 2, f"an entry and a blob for {entry.key.short}"


def test_a_golden_store_serves_as_a_shared_store_where_it_is(golden: Golden, tmp_path: Path) -> None:
    here = Store(tmp_path / "here", shared=[golden.folder / "store"])
    for key in golden.keys:
        assert here.get_or_build(key, lambda _: pytest.fail("built again"))[1]
    assert content(golden.folder) == golden.before
    assert [path for path in files_below(here.root) if "blobs" in path.parts] == []


def test_damage_to_one_entry_costs_that_entry_alone(golden: Golden) -> None:
    first, *others = golden.keys
    flip(golden.store.layout.entry(first.kind, first.hex))
    assert golden.store.lookup(first) is None
    assert all(golden.store.lookup(key, verify=True) for key in others)


# Schemas from before and after


@pytest.mark.parametrize("folder", ["v0", f"v{SCHEMA + 1}"])
def test_a_store_of_another_schema_beside_it_is_left_alone(folder: str, tmp_path: Path) -> None:
    golden = Golden(f"v{SCHEMA}", tmp_path / "golden")
    other = golden.store.root / folder
    shutil.copytree(golden.store.layout.base, other)
    (other / "something new").write_text("of a later version")
    (other / "tmp").mkdir()
    (other / "tmp" / "abandoned").write_text("long ago")
    os.utime(other / "tmp" / "abandoned", (1, 1))
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files_below(other)}
    store = Store(golden.store.root)
    for path in golden.store.layout.entries.rglob("*.json"):
        path.unlink()
    assert all(store.lookup(key) is None for key in golden.keys), "entries of another schema are not this one's"
    store.get_or_build(golden.keys[0], lambda space: {"w": space.put_bytes(b"new")})
    assert store.verify().bad == []
    assert store.usage().entries == 1
    from llmc.cli.main import main

    assert main(["cache", "gc", "--max-size", "0", "-q", "--cache-dir", str(store.root)]) == 0
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files_below(other)} == before


@pytest.mark.parametrize(
    ("schema", "reported"),
    [
        (2, "bundle schema 2 is newer than schema 1, which this llmc reads; upgrade llmc, or compile the bundle again"),
        (0, "bundle schema 0 is older than schema 1, which this llmc reads; compile the bundle again"),
        ("1", "'schema' must be an integer"),
    ],
)
def test_a_bundle_of_another_schema_is_refused_and_the_error_says_what_to_do(
    schema: object, reported: str, tmp_path: Path
) -> None:
    golden = Golden("v1", tmp_path / "golden")
    file = golden.bundle / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "schema": schema}))
    with pytest.raises(ArtifactError) as caught:
        BundleFiles.open(golden.bundle)
    assert str(caught.value).startswith(f"{file}: ") and reported in str(caught.value)
    assert caught.value.exit_code == 5


def test_an_entry_of_another_schema_is_a_miss_and_is_put_aside(tmp_path: Path) -> None:
    golden = Golden("v1", tmp_path / "golden")
    key = golden.keys[0]
    path = golden.store.layout.entry(key.kind, key.hex)
    body = {**json.loads(path.read_bytes())["entry"], "schema": 2}
    path.write_bytes(canonical_json({"digest": digest_bytes(canonical_json(body)), "entry": body}))
    assert golden.store.lookup(key) is None
    assert not path.exists()
    assert len(files_below(golden.store.layout.quarantine)) == 1


# Formats, to the byte


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": 1, "a": [True, None, "x"]}, '{"a":[true,null,"x"],"b":1}'),
        ({"é": "ü\n\"\\", "Z": "\u2028", "a": "\x7f"}, '{"Z":"\u2028","a":"\x7f","é":"ü\\n\\"\\\\"}'),
        ([1.0, 0.1, 1e-05, 1e22, -0.0, 123456789012345678901], "[1.0,0.1,1e-05,1e+22,-0.0,123456789012345678901]"),
        ({}, "{}"),
    ],
)  # fmt: skip
def test_canonical_json_is_as_it_was(value: object, text: str) -> None:
    assert canonical_json(value) == text.encode()


@pytest.mark.parametrize(
    ("kind", "components", "digest"),
    [
        ("executable", {}, "df032a52799e1bfd1e02edbd5d12c72ba71e0fbe541d6d0deee4369436809c79"),
        (
            "executable",
            {"shape.batch": 4, "shape.context": None, "target": "cpu"},
            "10024e8c3a70e4285b2de03b305f58b05f3efd1a98106d7ac6a906edc51f92f2",
        ),
        (
            "weights",
            {"checkpoint": "sha256:" + "ab" * 32, "specialised": True},
            "3abba2f4bc58524f7a384f8c934ad69e27dddd68ecca46d81d99c1f32c678093",
        ),
        (
            "local-file-digest",
            {"inode": 2**63, "note": "ü"},
            "472661f57f3324e74fc202bd193ed9b3b47dfb712894b375ad737387f0cf9647",
        ),
        (
            "bundle",
            {"manifest": "sha256:" + "0" * 64},
            "a25a03feb68be352fa447eafd23d8d5cc75bdde92b59636f6c6234286b45f2b4",
        ),
    ],
)
def test_digests_of_keys_are_as_they_were(kind: str, components: dict[str, Any], digest: str) -> None:
    assert Key(kind, components).hex == digest


ENTRY = Entry(
    Key("executable", {"shape.batch": 4, "target": "cpu"}),
    {"executable": Blob("sha256:" + "1" * 64, 5)},
    {"seconds": 1.5, "state": "native"},
    1_750_000_000.25,
    0.0,
)
BODY = (
    '{"components":{"shape.batch":4,"target":"cpu"},"created":1750000000.25,"kind":"executable",'
    '"meta":{"seconds":1.5,"state":"native"},'
    '"outputs":{"executable":{"digest":"sha256:' + "1" * 64 + '","size":5}},"schema":1}'
)


def test_an_entry_is_encoded_as_it_was() -> None:
    assert entry_body(ENTRY) == BODY.encode()
    start = f'{{"digest":"{digest_bytes(BODY.encode())}","entry":{BODY}'
    assert encode_entry(ENTRY) == (start + "}").encode()
    signed = ENTRY._replace(signature={"payload": "…", "payloadType": "x"})
    assert entry_body(signed) == BODY.encode(), "the signature is not part of what is signed"
    assert encode_entry(signed) == (start + ',"signature":{"payload":"…","payloadType":"x"}}').encode()


def test_a_manifest_is_encoded_as_it_was() -> None:
    built = Manifest.create(llmc="0.1.0", device="cpu", target="t", executor="e", files={}, summary={"ü": 1})
    text = (
        '{\n "blobs": {},\n "device": "cpu",\n "executables": [],\n "executor": "e",\n "files": {},\n'
        ' "kind": "llmc-bundle",\n "llmc": "0.1.0",\n "schema": 1,\n "summary": {\n  "\\u00fc": 1\n },\n'
        ' "target": "t"\n}\n'
    )
    assert built.to_bytes() == text.encode()
    assert bundle_key(built).components == {"manifest": digest_bytes(text.encode())}
