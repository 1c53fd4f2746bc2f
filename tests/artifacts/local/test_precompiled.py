"""NEURON_COMPILED_ARTIFACTS and VLLM_XLA_CACHE_PATH: what is loaded, what is compiled, and what is said.

No target for Neuron exists: the fake device is given a place of its own instead.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

import llmc
from llmc import api
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.stored import add_bundle
from llmc.artifacts.key import ABSENT, Difference
from llmc.artifacts.local import precompiled
from llmc.artifacts.local.opening import open_store
from llmc.artifacts.local.precompiled import FOLDER_NAMES, describe_differences, differences, load, path_for, replacing
from llmc.artifacts.oci.archive import export_images
from llmc.artifacts.store.store import Store
from llmc.cli.main import main
from llmc.errors import ArtifactError
from llmc.settings import Settings
from llmc.testing.toy import write_toy
from tests.artifacts.helpers import CONTENT, DIGESTS, bundle, child, finish, flip, manifest, truncate
from tests.tiers import default_cases

REQUESTED: dict[str, Any] = {"device": "fake", "max_model_len": 32, "max_num_seqs": 4}
NAME = FOLDER_NAMES["neuron"]
GREEDY = llmc.SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint for a device that has a place for its artifacts."""
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("NEURON_COMPILED_ARTIFACTS", raising=False)
    monkeypatch.setitem(precompiled.FOLDER_NAMES, "fake", NAME)
    return write_toy(tmp_path / "toy")


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The outcome of every compile in the test."""
    results: list[Any] = []
    compile_ = api.compile
    monkeypatch.setattr(api, "compile", lambda *a, **b: results.append(compile_(*a, **b)) or results[-1])
    return results


def generated(toy: Path, **options: Any) -> list[int]:
    with llmc.LLM(toy, **{**REQUESTED, **options}) as llm:
        return llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids


# Where


def test_only_neuron_has_a_place(tmp_path: Path) -> None:
    assert path_for("neuron", str(tmp_path), None) == tmp_path / "neuron-compiled-artifacts"
    assert path_for("neuron", str(tmp_path), "/named") == Path("/named")
    for device in ("cpu", "hpu", "fake", "tpu"):
        assert path_for(device, str(tmp_path), "/named") is None


def test_the_place_of_a_file_is_beside_it_and_a_hub_name_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").touch()
    assert path_for("neuron", str(tmp_path / "model.gguf"), None) == tmp_path / NAME
    assert path_for("neuron", "org/name", None) is None
    monkeypatch.setenv("HOME", "/home/someone")
    assert path_for("neuron", "org/name", "~/named") == Path("/home/someone/named")


# Whether it can be loaded


def test_an_intact_bundle_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load(bundle(tmp_path / "bundle").folder) == manifest()
    assert load(tmp_path / "nowhere") is None
    assert caplog.messages == []


@pytest.mark.parametrize("name", sorted(CONTENT))
@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_a_damaged_one_is_not_and_a_warning_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Any
) -> None:
    folder = bundle(tmp_path / "bundle").folder
    damage(folder / "blobs" / "sha256" / DIGESTS[name][7:])
    assert load(folder) is None
    (message,) = caplog.messages
    assert message.startswith(f"{folder}: not loaded, so it is compiled again: ") and DIGESTS[name] in message


# What differs


def test_a_bundle_that_matches_has_no_differences() -> None:
    wanted = {"device": "cpu", "options": {"threads": 2}, "model": {}, "plan": dict(manifest().plan)}
    assert differences(manifest(), wanted) == []
    assert differences(manifest(), {}) == []


def test_each_component_that_differs_is_named() -> None:
    wanted = {"device": "hpu", "options": {"threads": 2, "dtype": "bf16"}, "model": {"layers": 3}}
    found = differences(manifest(), wanted)
    assert found == [
        Difference("device", "cpu", "hpu"),
        Difference("model.layers", 2, 3),
        Difference("options.dtype", ABSENT, "bf16"),
    ]
    assert describe_differences(found) == "device: hpu → cpu, model.layers: 3 → 2, options.dtype: bf16 → (absent)"


def test_buckets_of_a_plan_are_one_component() -> None:
    wanted = {"plan": {"decode": [[4, 1, 256]]}}
    (found,) = differences(manifest(), wanted)
    assert found.name == "plan.decode"
    assert describe_differences([found]).startswith("plan.decode: [[4,1,256]] → ")


def test_what_a_compile_replaced_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = bundle(tmp_path / "bundle").folder
    with replacing(folder):
        bundle(tmp_path / "bundle", target="other")
    assert caplog.messages == [f"{folder}: replaced; target: onnxruntime → other"]
    for location in (folder, tmp_path / "nowhere", None):
        with replacing(location):
            pass
    assert len(caplog.messages) == 1


# LLM


def test_the_first_start_compiles_into_the_checkpoint_and_the_next_ones_load(toy: Path, compiles: list[Any]) -> None:
    first = generated(toy)
    assert BundleFiles.open(toy / NAME).verify() == []
    assert [generated(toy) for _ in range(2)] == [first, first]
    assert [result.bundle for result in compiles] == [str(toy / NAME)]


def test_the_variable_names_another_place(
    toy: Path, tmp_path: Path, compiles: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_COMPILED_ARTIFACTS", str(tmp_path / "artifacts"))
    assert generated(toy) == generated(toy)
    assert [result.bundle for result in compiles] == [str(tmp_path / "artifacts")]
    assert not (toy / NAME).exists()


def test_another_configuration_is_said_and_not_compiled(
    toy: Path, compiles: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    generated(toy)
    caplog.clear()
    generated(toy, dtype="bf16", max_num_seqs=2, specialise=False, decode_batch=(1, 1, 2))
    (message,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert message.startswith(f"{toy / NAME} is loaded as it was compiled, although requested otherwise: ")
    named = ("options.dtype: bf16 → f32", "options.specialise: false → true", "plan.limits.max_num_seqs: 2 → 4")
    assert all(component in message for component in (*named, "plan.decode: "))
    assert "max_model_len" not in message and "device" not in message
    assert len(compiles) == 1


def test_the_same_configuration_says_nothing(toy: Path, caplog: pytest.LogCaptureFixture) -> None:
    generated(toy, dtype="f32", decode_batch=(1, 1, 4))
    generated(toy, dtype="f32", decode_batch=(1, 1, 4), jobs=1, verify="none")
    generated(toy, plan=llmc.plan(toy, max_model_len=32, max_num_seqs=4, decode_batch=(1, 1, 4)))
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_another_model_is_said(
    toy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_COMPILED_ARTIFACTS", str(tmp_path / "artifacts"))
    generated(toy)
    write_toy(tmp_path / "larger", vocab=300)
    generated(tmp_path / "larger")
    assert "model.vocab_size: 300 → 257" in caplog.text


@default_cases(1)
@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_what_is_damaged_is_compiled_again_there(toy: Path, compiles: list[Any], damage: Any) -> None:
    first = generated(toy)
    damage(BundleFiles.open(toy / NAME).path("tokenizer.json"))
    assert generated(toy) == first
    assert [result.bundle for result in compiles] == [str(toy / NAME)] * 2
    assert BundleFiles.open(toy / NAME).verify() == []


def test_what_is_no_bundle_is_not_overwritten(toy: Path) -> None:
    (toy / NAME).mkdir()
    (toy / NAME / "model.pt").write_text("someone's")
    with pytest.raises(ArtifactError, match="not a bundle, so it is not replaced"):
        generated(toy)
    assert (toy / NAME / "model.pt").read_text() == "someone's"


def test_a_bundle_that_is_named_is_compared_too(
    toy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMC_ALLOW_UNSIGNED", "1")
    generated(toy)
    shutil.move(toy / NAME, tmp_path / "bundle")
    store = Store(tmp_path / "s")
    export_images(store, [add_bundle(store, BundleFiles.open(tmp_path / "bundle"))], tmp_path / "b.tar")
    for name in ("bundle", "b.tar"):
        caplog.clear()
        with llmc.LLM(tmp_path / name):
            assert caplog.messages == []
        with llmc.LLM(tmp_path / name, dtype="f16", max_num_seqs=4):
            (message,) = caplog.messages
        assert message.endswith("although requested otherwise: options.dtype: f16 → f32")


def test_a_folder_is_loaded_without_the_compiler(toy: Path) -> None:
    generated(toy)
    script = """
        import sys
        from llmc import LLM
        LLM(sys.argv[1]).close()
        local = "llmc.artifacts.local"
        names = ("llmc.compiler", f"{local}.precompiled", f"{local}.references", "llmc.artifacts.oci")
        print([name for name in sys.modules if name.startswith(names)])
    """
    assert finish(child(script, toy / NAME)) == "[]"


# llmc compile

COMPILE = ("--device", "fake", "--max-model-len", "32", "--max-num-seqs", "4", "-q")


def test_compiling_without_an_output_goes_there_and_says_what_it_replaces(
    toy: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(toy.parent)
    assert main(["compile", str(toy), *COMPILE]) == 0
    assert not list(toy.parent.glob("*.llmc"))
    first = BundleFiles.open(toy / NAME).manifest
    assert main(["compile", str(toy), *COMPILE]) == 0
    assert caplog.messages == [] and BundleFiles.open(toy / NAME).manifest == first
    assert main(["compile", str(toy), *COMPILE, "--max-model-len", "16"]) == 0
    assert caplog.messages[-1].startswith(f"{toy / NAME}: replaced; ")
    assert "plan.limits.max_model_len: 32 → 16" in caplog.messages[-1]


def test_an_output_that_is_named_is_where_it_goes(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_COMPILED_ARTIFACTS", str(toy.parent / "artifacts"))
    assert main(["compile", str(toy), *COMPILE, "-o", str(toy.parent / "named")]) == 0
    assert not (toy.parent / "artifacts").exists() and BundleFiles.open(toy.parent / "named").verify() == []


# VLLM_XLA_CACHE_PATH


def test_the_xla_cache_is_the_store_of_xla_devices(tmp_path: Path) -> None:
    settings = Settings.from_environment({"VLLM_XLA_CACHE_PATH": str(tmp_path / "xla")})
    for device in ("tpu", "xla"):
        assert open_store(None, settings, device).root == tmp_path / "xla"
    for other in ("cpu", "neuron", None):
        assert open_store(None, settings, other).root == settings.cache_dir != tmp_path / "xla"
    assert open_store(tmp_path / "flag", settings, "tpu").root == tmp_path / "flag"


def test_llmcs_own_variable_wins_over_the_xla_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"VLLM_XLA_CACHE_PATH": str(tmp_path / "xla"), "LLMC_CACHE_DIR": str(tmp_path / "cache")}
    assert Settings.from_environment(both).cache_dir_for("tpu") == tmp_path / "cache"
    monkeypatch.setenv("HOME", "/home/someone")
    home = Settings.from_environment({"VLLM_XLA_CACHE_PATH": "~/xla"})
    assert home.cache_dir_for("xla") == Path("/home/someone/xla")


def test_compiles_for_xla_go_into_the_xla_cache(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMC_CACHE_DIR")
    monkeypatch.setenv("VLLM_XLA_CACHE_PATH", str(tmp_path / "xla"))
    monkeypatch.setattr("llmc.settings.XLA_DEVICES", ("fake",))
    generated(toy)
    assert {entry.key.kind for entry in Store(tmp_path / "xla").entries()} >= {"executable", "bundle"}
