"""Whatever comes from elsewhere is what it should be, or one of llmc's own errors: sound documents with something
changed, for each reader. (Signatures, archives, layers, stamps, plans, traffic and bench files are elsewhere.)
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from llmc.artifacts.bundle.manifest import Manifest, read_manifest
from llmc.artifacts.bundle.trust import code_of_bundle, code_of_entry
from llmc.artifacts.bundle.writer import write_bundle
from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import canonical_json
from llmc.artifacts.oci.image import read_diff_ids, read_image
from llmc.artifacts.store.entries import decode_entry, encode_entry
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.checkpoint.safetensors_file import SafetensorsFile
from llmc.compiler.text import build_index
from llmc.errors import ArtifactError, CheckpointError, LlmcError
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors.envelope import ExecutableFile, write_envelope
from llmc.runtime.executors.weight_placements import read_placements
from llmc.runtime.executors.xla.envelope import FORM, StepHeader
from llmc.runtime.llm import BundleLLM
from llmc.runtime.text.vocabulary import MAGIC, Vocabulary
from llmc.testing.toy import tokenizer_json
from tests.artifacts.helpers import DIGESTS, manifest
from tests.compiler.checkpoint.writers import write_gguf
from tests.hostile import as_json, changed, damaged
from tests.manifests import write_manifest
from tests.tiers import default_cases, examples
from tests.toy import Toy

fuzzed = examples(60, suppress_health_check=list(HealthCheck))


def survives(read: Callable[[], object], *own: type[Exception]) -> None:
    """`read` ends well or with an error of llmc's own."""
    try:
        read()
    except (LlmcError, *own):
        return


# Checkpoints

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def safetensors(header: object) -> bytes:
    text = as_json(header)
    return struct.pack("<Q", len(text)) + text + bytes(32)


def read_safetensors(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    file = SafetensorsFile(path)
    for name in file.tensors:
        file.tensor(name)


@fuzzed
@given(changed(HEADER).map(safetensors) | damaged(safetensors(HEADER)))
def test_safetensors(tmp_path: Path, data: bytes) -> None:
    survives(lambda: read_safetensors(tmp_path / "a.safetensors", data))


@pytest.mark.parametrize("shape", [[1] * 65 + [8], [0] + [2**40] * 3, [0, 10**30], [1] * 17 + [8]])
def test_shapes_that_no_array_has(tmp_path: Path, shape: list[int]) -> None:
    end = 0 if 0 in shape else 32
    header = {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}
    with pytest.raises(CheckpointError, match="which is impossible"):
        read_safetensors(tmp_path / "a.safetensors", safetensors(header))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    write_gguf(path)
    return path.read_bytes()


@fuzzed
@given(st.data())
def test_gguf(tmp_path: Path, gguf: bytes, data: st.DataObject) -> None:
    def read() -> None:
        checkpoint = open_checkpoint(str(path))
        for name in checkpoint.tensor_names():
            checkpoint.tensor(name)
        checkpoint.tokenizer_json(), checkpoint.chat_template(), checkpoint.special_tokens()
        checkpoint.generation_config()

    path = tmp_path / "a.gguf"
    path.write_bytes(data.draw(damaged(gguf[:3000])) + gguf[3000:])
    survives(read)


# Bundles and results


@fuzzed
@given(changed(manifest().to_dict()))
def test_manifests(document: object) -> None:
    def read() -> None:
        found = Manifest.from_bytes(as_json(document))
        assert Manifest.from_bytes(found.to_bytes()) == found
        code_of_bundle(found)

    survives(read)


def test_a_manifest_of_a_million_executables_is_refused_for_what_it_is(tmp_path: Path) -> None:
    item = json.dumps(manifest().to_dict()["executables"][0])
    (tmp_path / "manifest.sha256").write_text("0" * 64 + "  manifest.json\n")
    with (tmp_path / "manifest.json").open("w") as file:
        file.write('{"executables": [')
        for _ in range(100):
            file.write(f"{item}, " * 10_000)
        file.write("]}")
    with pytest.raises(ArtifactError, match="larger than 67108864 bytes"):
        read_manifest(tmp_path)


def test_a_manifest_that_could_not_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.artifacts.bundle import writer as bundle_writer

    monkeypatch.setattr(bundle_writer, "MAX_BYTES", 1000)
    sources = dict.fromkeys(DIGESTS.values(), tmp_path)
    with pytest.raises(ArtifactError, match=r"a manifest of 2 executables has \d+ bytes, .*; plan fewer buckets"):
        write_bundle(tmp_path / "bundle", manifest(), sources)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    built = Toy.make(tmp_path_factory.mktemp("toy"))
    built.compile()
    return built


@pytest.fixture(scope="module")
def members(toy: Toy) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((toy.bundle / "manifest.json").read_bytes())
    return found


def generate(toy: Toy, members: dict[str, Any]) -> None:
    write_manifest(toy.bundle, as_json(members))
    with BundleLLM(toy.bundle, 1) as llm:
        llm.generate(["ab"], SamplingParams(max_tokens=2))


@default_cases(2)
@fuzzed
@given(st.data())
@pytest.mark.parametrize("member", ["model", "options", "toolchain", "plan", "files"])
def test_members_of_a_manifest(toy: Toy, members: dict[str, Any], member: str, data: st.DataObject) -> None:
    value = data.draw(changed(members[member]))
    survives(lambda: generate(toy, {**members, member: value}))


@pytest.mark.parametrize(
    ("member", "name", "value"),
    [
        ("model", "vocab_size", -1), ("model", "kv_heads", 2**60), ("model", "head_dim", "8"),
        ("model", "vocab_size", 2**49), ("model", "head_dim", 3), ("model", "eos_token_ids", [[]]),
        ("options", "sample_top_k", 1.5), ("options", "sample_top_k", 2**70),
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_reported_by_name(
    toy: Toy, members: dict[str, Any], member: str, name: str, value: object
) -> None:
    with pytest.raises(LlmcError, match=f"{member}.{name}|no memory|sizes that the manifest states"):
        generate(toy, {**members, member: {**members[member], name: value}})


BODY = {
    "schema": 1, "kind": "weights", "components": {"a": 1}, "meta": {"seconds": 1.0}, "created": 1.5,
    "outputs": {"weights": {"digest": "sha256:" + "0" * 64, "size": 5}},
}  # fmt: skip


@fuzzed
@given(changed(BODY))
def test_entries(body: object) -> None:
    def read() -> None:
        entry = decode_entry(as_json({"digest": digest_bytes(canonical_json(body)), "entry": body}))
        code_of_entry(entry.key, entry.meta)
        encode_entry(entry)

    survives(read, ValueError, TypeError)


IMAGE = {
    "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
    "artifactType": "application/vnd.llmc.bundle.v1",
    "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": "sha256:" + "0" * 64, "size": 3},
    "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": "sha256:" + "1" * 64, "size": 3}],
}  # fmt: skip
CONFIG = {"rootfs": {"type": "layers", "diff_ids": ["sha256:" + "1" * 64]}}


@fuzzed
@given(changed(IMAGE), changed(CONFIG))
def test_images(image: object, config: object) -> None:
    survives(lambda: read_image(as_json(image), "image"))
    survives(lambda: read_diff_ids(as_json(config), 1, "image"))


# Files of a bundle

PLACEMENTS = {"a": {"shape": [2, 3], "dtype": "float32", "offset": 0, "length": 24}}


class _Files:
    def __init__(self, content: bytes) -> None:
        self.path, self.files, self._content = Path("bundle"), self, content

    def read(self, name: str) -> bytes:
        return self._content


@fuzzed
@given(changed(PLACEMENTS))
def test_locations_of_weights(locations: object) -> None:
    def read() -> None:
        for location in read_placements(_Files(as_json(locations))).values():  # type: ignore[arg-type]
            assert all(type(size) is int for size in location["shape"]) and type(location["offset"]) is int

    survives(read)


TENSOR = {"name": "a", "shape": [2, 4], "dtype": "float32", "dims": [None, "tp"]}
STEP = {
    "platform": "cpu", "topology": "cpu", "devices": 2, "jax": "0", "kind": "step", "inputs": [TENSOR, TENSOR],
    "outputs": [TENSOR], "donated": [[0, 1]],
}  # fmt: skip


@fuzzed
@given(changed(STEP))
def test_headers_of_xla_executables(header: Any) -> None:
    def read() -> None:
        envelope = ExecutableFile.parse(write_envelope(header, {"native": b"code"}, FORM), "executable", FORM)
        StepHeader.parse(envelope.header, "executable")

    if isinstance(header, dict):
        survives(read, ValueError)


@fuzzed
@given(damaged(write_envelope(STEP, {"native": b"code"}, FORM)))
def test_xla_executables(data: bytes) -> None:
    survives(lambda: StepHeader.parse(ExecutableFile.parse(data, "executable", FORM).header, "executable"))


INDEX = build_index(tokenizer_json().encode(), smallest=0)


def _index(header: object) -> bytes:
    assert INDEX is not None
    at = len(MAGIC) + 4
    end = at + int.from_bytes(INDEX[at - 4 : at], "little")
    text = as_json(json.loads(INDEX[at:end]) if header is None else header)
    return MAGIC + len(text).to_bytes(4, "little") + text + bytes(-(at + len(text)) % 8) + INDEX[end + -end % 8 :]


def _index_header() -> Any:
    assert INDEX is not None
    at = len(MAGIC) + 4
    return json.loads(INDEX[at : at + int.from_bytes(INDEX[at - 4 : at], "little")])


@fuzzed
@given(changed(_index_header()).map(_index) | damaged(_index(None)))
def test_vocabulary_indexes(data: bytes) -> None:
    def read() -> None:
        vocabulary = Vocabulary(data)
        vocabulary.cut("hello there")
        [vocabulary.token(index) for index in range(300)]

    survives(read)


@pytest.mark.parametrize(
    "lie",
    [{"as_int": "a file"}, {"as_ints": ["a file"]}, {"as_float": "a file"}, {"as_bool": 1}, {"as_string": "a file"}],
)
def test_arguments_of_portable_programs_are_of_the_kind_that_they_say(lie: dict[str, Any]) -> None:
    """Else an operator that takes the name of a file could be given one."""
    pytest.importorskip("torch")
    from llmc.runtime.portable_program import argument

    assert argument({"as_ints": [1, 2]}, {}.__getitem__) == [1, 2]
    assert argument({"as_float": "-Infinity"}, {}.__getitem__) == float("-inf")
    with pytest.raises(ValueError, match="an argument is as_"):
        argument(lie, {}.__getitem__)
