"""Encoders on XLA: an executable a bucket over one weights file, for this CPU and for TPUs that are only described."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import llmc
from llmc.artifacts.bundle.trust import UntrustedError
from llmc.buckets.bucket import Bucket
from llmc.buckets.encoding import EncodePlan
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Provenance
from llmc.compiler.options import CompileOptions
from llmc.compiler.targets.encoder import encoder_target, open_encoder_target
from llmc.compiler.targets.xla.target import analysis_lines
from llmc.compiler.targets.xla.tpu import CHIPS
from llmc.errors import ArtifactError, CompileError, InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors.encoders import open_encoder
from llmc.runtime.executors.envelope import ExecutableFile
from llmc.runtime.executors.xla import programs
from llmc.runtime.executors.xla.envelope import FORM, StepHeader
from tests.compiler.encoders_tiny import write_encoder
from tests.tiers import full

pytestmark = full

TEXTS = ["a", "a longer text, of more words", "some text"]
BUCKETS = ((1, 16), (1, 32), (2, 16))


def plan(*buckets: tuple[int, int]) -> EncodePlan:
    found = tuple(Bucket("prompt", batch, tokens, 0) for batch, tokens in buckets)
    return EncodePlan(Limits(32, 2, 64), found, Provenance("test"), "embed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("xla-encoders")
    write_encoder(found / "bert", "bert")
    return found


def compiled(folder: Path, name: str = "bundle", model: str = "bert", **how: Any) -> Any:
    how = {"device": "xla", "plan": plan(*BUCKETS), "jobs": 1} | how
    return llmc.compile(folder / model, folder / name, cache_dir=folder / "store", **how)


@pytest.fixture(scope="module")
def built(folder: Path) -> Any:
    return compiled(folder)


@pytest.fixture(scope="module")
def embedding(folder: Path, built: Any) -> Iterator[llmc.LLM]:
    with llmc.LLM(folder / "bundle") as llm:
        yield llm  # type: ignore[misc]


def test_each_bucket_has_a_native_executable_and_batches_are_padded_to_the_cheapest(
    folder: Path, built: Any, embedding: llmc.LLM
) -> None:
    assert (built.built, built.native, built.specialised) == (3, 3, True)
    assert built.choice == "one executable per bucket of texts × tokens: XLA compiles fixed shapes"
    compiled(folder, "other", device="onnxruntime", plan=None, max_num_seqs=2, max_model_len=32)
    with llmc.LLM(folder / "other") as llm:
        wanted = [one.outputs.embedding for one in llm.embed(TEXTS)]
    assert np.allclose([one.outputs.embedding for one in embedding.embed(TEXTS)], wanted, atol=1e-5)
    assert embedding.pooler.statistics.buckets == {(1, 32): 1, (2, 16): 1}
    assert embedding.pooler.encoder.compilations.count == 0
    held = embedding.pooler.encoder.memory()
    assert held["weights"] == built.weights_bytes
    assert held["executables"] > 0


def test_weights_lie_in_one_file_and_are_arguments_of_every_executable(embedding: llmc.LLM) -> None:
    bundle = embedding.bundle
    offsets = json.loads(bundle.files.read("weights.json"))
    for executable in bundle.manifest.executables:
        header = StepHeader.parse(ExecutableFile.parse(bundle.files.read(executable.blob), "it", FORM).header, "it")
        assert [t.name for t in header.inputs[:3]] == ["token_ids", "lengths", "type_ids"]
        assert {t.name for t in header.inputs[3:]} == set(offsets)
        assert [t.shape for t in header.outputs] == [(executable.batch, executable.query, 32)]
        assert header.kind == "encode"


def test_another_checkpoint_of_the_same_shapes_finds_all_executables(folder: Path, embedding: llmc.LLM) -> None:
    other = Path(shutil.copytree(folder / "bert", folder / "other-weights"))
    tensors = {name: tensor * 1.5 for name, tensor in load_file(folder / "bert" / "model.safetensors").items()}
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    again = compiled(folder, "again", "other-weights")
    assert (again.built, again.reused) == (0, 3)
    assert again.verification["cosine"] > 0.99999
    with llmc.LLM(folder / "again") as llm:
        found = llm.embed(TEXTS[0])[0].outputs.embedding
    assert not np.allclose(found, embedding.embed(TEXTS[0])[0].outputs.embedding, atol=1e-3)


@pytest.mark.parametrize(("how", "quality"), [({"dtype": "bf16"}, "bf16"), ({"quantize": "int8"}, "int8")])
@pytest.mark.usefixtures("built")
def test_smaller_formats_take_less_and_stay_within_their_limits(
    folder: Path, how: dict[str, str], quality: str
) -> None:
    small = compiled(folder, quality, plan=plan((2, 32)), **how)
    assert small.verification["quality"] == quality
    assert small.verification["cosine"] < 0.9999999, "it ran in float32"

    def weights(bundle: str) -> int:
        offsets = json.loads(Bundle.open(folder / bundle).files.read("weights.json"))
        return sum(at["length"] for at in offsets.values())

    assert weights(quality) < 0.6 * weights("bundle")


@pytest.mark.usefixtures("built")
def test_a_portable_program_is_compiled_where_the_toolchain_is_another_and_counted(
    folder: Path, embedding: llmc.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = embedding.embed(TEXTS[0])[0].outputs.embedding
    monkeypatch.setattr(programs, "toolchain_version", lambda platform: "another")
    with llmc.LLM(folder / "bundle") as llm:
        assert np.allclose(llm.embed(TEXTS[0])[0].outputs.embedding, wanted, atol=1e-6)
        assert llm.pooler.encoder.compilations.compiled == ("encode batch=1 query=16 context=0",)


@pytest.mark.usefixtures("built")
def test_code_that_was_not_judged_native_is_not_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise UntrustedError(f"{name} is code")

    encoder = open_encoder(Bundle.open(folder / "bundle"))
    monkeypatch.setattr(encoder.bundle.files, "require_native", refuse)
    ids = np.ones((1, 16), np.int64)
    with pytest.raises(UntrustedError, match="encode batch=1 query=16 context=0 is code"):
        encoder.encode({"token_ids": ids, "lengths": np.array([3]), "type_ids": ids})
    encoder.close()


@pytest.mark.usefixtures("built")
def test_a_shape_that_the_bundle_lacks_is_refused(folder: Path) -> None:
    encoder = open_encoder(Bundle.open(folder / "bundle"))
    ids = np.ones((2, 32), np.int64)
    with pytest.raises(ArtifactError, match="no executable for encode batch 2, query 32"):
        encoder.encode({"token_ids": ids, "lengths": np.array([3, 4]), "type_ids": ids})
    encoder.close()


@pytest.mark.parametrize(
    ("device", "how", "said"),
    [
        ("xla", {"specialise": False}, "--no-specialise is not offered for device xla: XLA compiles fixed shapes"),
        ("xla", {"quantize": "fp8"}, "--quantize fp8 is not offered for embedding and scoring on device xla"),
        ("xla", {"dtype": "f16"}, "--dtype f16 is not offered for embedding and scoring on device xla"),
        ("xla", {"own": {"tensor_parallel": 2}}, "--tensor-parallel is for models that generate text"),
        ("tpu:v5e", {}, "topology 'v5e' is not of the form GENERATION-SHAPE"),
        ("tpu:v5e-3x3", {}, "v5e has no slice of shape 3x3"),
        ("tpu", {}, "--device tpu: name the slice"),
    ],
)
def test_what_is_not_offered_is_refused(device: str, how: dict[str, Any], said: str) -> None:
    target, _ = open_encoder_target(device)
    with pytest.raises(InputError, match=said):
        target.configure(replace(CompileOptions(device), **how))


def test_text_behind_the_device_means_what_it_means_for_models_that_generate() -> None:
    with pytest.raises(InputError, match="xla:2"):
        open_encoder_target("xla:2")
    assert encoder_target("tpu").name == "tpu", "verification needs no topology"


def test_native_executables_may_be_required_where_they_are_built() -> None:
    xla, openvino = encoder_target("xla"), encoder_target("openvino")
    assert xla.configure(CompileOptions("xla", require_native=True)).require_native
    with pytest.raises(InputError, match="--require-native: models that embed or score are compiled on each host"):
        openvino.configure(CompileOptions("openvino", require_native=True))


def test_a_bundle_for_a_described_tpu_runs_here_from_its_portable_programs_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = compiled(folder, "tpu", device="tpu:v5e-1x1", plan=plan((2, 32)))
    assert (found.native, found.portable) == (1, 0)
    assert found.verification["cosine"] > 0.99999
    memory = found.analysis["device_memory"]
    assert memory["total"] == sum(memory[part] for part in ("weights", "cache", "temporary", "code"))
    assert memory["weights"] >= found.weights_bytes
    assert "one device of v5e-1x1: weights" in analysis_lines(found.analysis)[0]
    bundle = Bundle.open(folder / "tpu")
    assert bundle.manifest.options["analysis"] == found.analysis
    (executable,) = bundle.manifest.executables
    assert ExecutableFile.parse(bundle.files.read(executable.blob), "it", FORM).header["platform"] == "tpu"
    with llmc.LLM(folder / "tpu") as llm:
        assert len(llm.embed(TEXTS)) == 3
        assert llm.pooler.encoder.capabilities.in_place_of == "TPU"
        assert llm.pooler.encoder.compilations.count == 1
    said = "for tpu:v5e-1x1 are compiled here from their portable programs, each when it is first needed"
    assert any(said in record.message for record in caplog.records)


def test_what_does_not_fit_a_chip_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(CHIPS["v5e"], usable_bytes=1 << 16)
    monkeypatch.setitem(CHIPS, "v5e", small)  # type: ignore[misc] # a constant
    with pytest.raises(CompileError, match=r"does not fit v5e-1x1 by .* a chip has 65536 bytes for programs; lower"):
        compiled(folder, "none", device="tpu:v5e-1x1", plan=plan((2, 32)))
    assert not (folder / "none").exists()


@pytest.mark.usefixtures("built")
def test_a_warmed_up_bundle_opens_nothing_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with llmc.LLM(folder / "bundle", warm_up=True) as llm:
        opened = llm.pooler.encoder.memory()["executables"]
        assert llm.pooler.statistics.steps == 0, "a warm-up is no traffic"
        llm.embed(TEXTS)
        assert llm.pooler.encoder.memory()["executables"] == opened
        assert (llm.compilations, llm.compilations_at_open) == (0, ())
    monkeypatch.setattr(programs, "toolchain_version", lambda platform: "another")
    with llmc.LLM(folder / "bundle", warm_up=True) as llm:
        assert llm.compilations == 3


@pytest.mark.usefixtures("built")
def test_what_is_opened_after_the_warm_up_is_counted(folder: Path) -> None:
    encoder = open_encoder(Bundle.open(folder / "bundle"))
    encoder.compilations.ready()
    encoder.open_all()
    assert encoder.compilations.count == 3
    encoder.close()
