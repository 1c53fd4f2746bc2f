"""A configuration alone: opened as a checkpoint without weights, and compiled by devices that can."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from llmc.artifacts.bundle.manifest import read_manifest
from llmc.artifacts.store.store import Store
from llmc.buckets.limits import Limits
from llmc.compiler.checkpoint import open_checkpoint, read_config
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle, dry_run
from llmc.compiler.pipeline.resolve import CompileJob
from llmc.compiler.targets import open_target
from llmc.compiler.weights.stage import CONFIG as CONFIG_FILE
from llmc.compiler.weights.stage import TABLES, TENSORS
from llmc.errors import CheckpointError, InputError
from llmc.testing.toy import EOS, TEMPLATE, tokenizer_json, toy_plan, write_toy
from tests.compiler.checkpoint.writers import CONFIG, HIDDEN, LAYERS, TOKENS
from tests.tiers import full

PLAN = toy_plan([(1, 16, 0)], [(1, 15)], Limits(16, 1, 16, 8))


def write_config(folder: Path, name: str = "config.json", **members: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps({**CONFIG, **members}))
    return folder / name


# As a checkpoint


def test_a_config_file_opens_as_a_checkpoint_without_tensors(tmp_path: Path) -> None:
    file = write_config(tmp_path / "llama")
    opened = open_checkpoint(file)
    assert (opened.format, opened.name) == ("config", "llama")
    assert opened.config == read_config(file)
    assert opened.tensor_names() == []
    assert opened.roles() == {"config.json": file}
    assert opened.generation_config()["eos_token_ids"] == [0]
    for ask in (opened.tensor, opened.shape, opened.quantised_blocks):
        with pytest.raises(CheckpointError, match=r"config\.json is only a configuration, without weights; pass the"):
            ask("model.norm.weight")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        opened.tokenizer_json()


def test_a_file_of_another_name_is_named_by_it_and_takes_nothing_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    opened = open_checkpoint(write_config(tmp_path, "llama-3-70b.json"))
    assert opened.name == "llama-3-70b"
    assert list(opened.roles()) == ["config.json"]
    assert opened.chat_template() is None
    assert opened.special_tokens() == {}
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        opened.tokenizer_json()


def test_the_tokenizer_beside_a_config_json_counts_and_the_weights_there_do_not(tmp_path: Path) -> None:
    folder = write_toy(tmp_path / "toy")
    opened, whole = open_checkpoint(folder / "config.json"), open_checkpoint(folder)
    assert opened.tokenizer_json() == whole.tokenizer_json()
    assert opened.chat_template() == TEMPLATE
    assert opened.special_tokens() == {"eos_token": "<|end|>"}
    assert opened.generation_config()["eos_token_ids"] == [EOS]
    assert sorted(opened.roles()) == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert opened.tensor_names() == []


def test_the_digest_is_over_values_and_over_the_tokenizer(tmp_path: Path) -> None:
    file = write_config(tmp_path / "a")
    digest = open_checkpoint(file).digest()
    turned = tmp_path / "b" / "other.json"
    turned.parent.mkdir()
    turned.write_text(json.dumps(dict(reversed(CONFIG.items())) | {"_name_or_path": "/somewhere"}, indent=2))
    assert open_checkpoint(turned).digest() == digest, "neither names, nor places, nor the order of members"
    assert open_checkpoint(write_config(tmp_path / "c", rms_norm_eps=2e-5)).digest() != digest
    (tmp_path / "a" / "tokenizer.json").write_text(tokenizer_json())
    assert open_checkpoint(file).digest() != digest


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model_type": 3}', "[" * 100_000])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        open_checkpoint(tmp_path / "config.json")


# What is compiled of it


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For hpu, verified as it is by default."""
    folder = tmp_path_factory.mktemp("config")
    requested = CompileOptions(device="hpu")
    compile_bundle(
        str(write_config(folder / "llama")), folder / "bundle", PLAN, requested, Store(folder / "store"), lambda _: None
    )
    return folder / "bundle"


@full
def test_the_bundle_describes_its_weights_and_has_none(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    assert set(manifest.files) == {TENSORS, TABLES, CONFIG_FILE}
    described = {t["name"]: t for t in json.loads((bundle / "blobs/sha256" / manifest.files[TENSORS][7:]).read_bytes())}
    assert described["model.embed_tokens.weight"] == {
        "name": "model.embed_tokens.weight", "transform": "dense", "shape": [len(TOKENS), HIDDEN], "dtype": "float32",
        "sources": ["model.embed_tokens.weight"],
    }  # fmt: skip
    assert f"model.layers.{LAYERS - 1}.mlp.down_proj.weight" in described
    assert {t["transform"] for t in described.values() if not t["sources"]} == {"table"}
    config = json.loads((bundle / "blobs/sha256" / manifest.files[CONFIG_FILE][7:]).read_bytes())
    assert config == read_config(bundle.parent / "llama" / "config.json")
    assert manifest.model["name"] == "llama"
    assert {d["name"] for d in manifest.provenance["buildDefinition"]["resolvedDependencies"]} >= {
        "checkpoint/config.json"
    }


@full
def test_the_manifest_says_why_nothing_was_verified(bundle: Path) -> None:
    found = read_manifest(bundle).verification
    assert found["mode"] == "none"
    assert "no weights" in found["why"] and "llmc verify BUNDLE --reference MODEL" in found["why"]


def test_a_device_that_needs_weights_refuses_and_names_those_that_do_not(tmp_path: Path) -> None:
    file = write_config(tmp_path / "llama")
    able = [name for name in ("hpu", "xla", "tpu") if open_target(name).description.config_only]
    for run in (
        lambda options, store: compile_bundle(str(file), tmp_path / "b", PLAN, options, store, lambda _: None),
        lambda options, store: dry_run(CompileJob.of(str(file), PLAN, options), store),
    ):
        with pytest.raises(
            InputError, match=r"device cpu needs the weights to compile.*compile for one of: "
        ) as raised:
            run(CompileOptions(device="cpu"), Store(tmp_path / "store"))
        assert set(able) <= set(str(raised.value).rpartition(": ")[2].split(", "))
    assert not (tmp_path / "b").exists()


def test_asking_for_full_verification_of_a_configuration_is_refused(tmp_path: Path) -> None:
    file = write_config(tmp_path / "llama")
    options = CompileOptions(device="hpu", verify="all")
    with pytest.raises(InputError, match="--verify all needs weights to compare with"):
        compile_bundle(str(file), tmp_path / "b", PLAN, options, Store(tmp_path / "store"), lambda _: None)


def test_weights_beside_the_config_change_nothing(bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    shutil.copy(bundle.parent / "llama" / "config.json", folder)
    (folder / "model.safetensors").write_bytes(b"damaged")
    result = compile_bundle(
        str(folder / "config.json"), tmp_path / "b", PLAN, CompileOptions(device="hpu"), Store(bundle.parent / "store"),
        lambda _: None,
    )  # fmt: skip
    assert result.built == 0
    assert read_manifest(tmp_path / "b") == read_manifest(bundle)
