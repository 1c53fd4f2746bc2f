"""A checkpoint that contradicts itself is refused before anything is traced, with both sides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from llmc.artifacts.store.store import Store
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.frontend.consumed import require_consumed
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.errors import CheckpointError
from llmc.testing.toy import VOCAB
from tests.compiler import tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write_model(tmp_path / "model", "mistral")


def say(folder: Path, members: Mapping[str, Any], file: str = "config.json") -> None:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | members))


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        compile_bundle(
            str(folder), folder / "bundle", tiny.tiny_plan(), CompileOptions("cpu"), Store(folder / "store"), str
        )
    assert not (folder / "bundle").exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("said", "members"),
    [
        ("num_hidden_layers is 3, and the tensors are of 2 layers", {"num_hidden_layers": 3}),
        (
            "num_hidden_layers is 2, and layer_types lists 1 layers",
            {"model_type": "qwen3", "layer_types": ["full_attention"]},
        ),
        (
            "layer_types has sliding_attention, and sliding_window is null or switched off",
            {"model_type": "qwen3", "sliding_window": None, "layer_types": ["full_attention", "sliding_attention"]},
        ),
        (
            "layer_types has sliding_attention, and sliding_window is null or switched off",
            {"model_type": "qwen2", "use_sliding_window": False, "layer_types": ["sliding_attention"] * 2},
        ),
        ("sliding_window is 0, which no token is in (null switches it off)", {"sliding_window": 0}),
        ("num_experts_per_tok is 9, and a layer has 8 experts", {"num_local_experts": 8, "num_experts_per_tok": 9}),
        ("num_experts_per_tok is 0, and a layer has 4 experts", {"num_experts": 4, "num_experts_per_tok": 0}),
        ("vocab_size is 300, and", {"vocab_size": 300}),
    ],
)
def test_a_configuration_that_contradicts_itself_or_its_tensors_is_refused(
    folder: Path, said: str, members: dict[str, Any]
) -> None:
    say(folder, members)
    error = refused(folder)
    assert error.startswith(f"{folder}: {said}")
    assert error.endswith("the files are of two models, or config.json was edited: fetch them again")


def test_fewer_layers_than_the_tensors_are_of_leave_tensors_that_nothing_takes(folder: Path) -> None:
    say(folder, {"num_hidden_layers": 1})
    assert "takes the tensors model.layers.1." in refused(folder)


def test_an_embedding_of_another_vocabulary_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]
    save_file(tensors, path, {"format": "pt"})
    assert f"vocab_size is {VOCAB}, and lm_head.weight has {VOCAB - 1} rows" in refused(folder)


def test_a_tokenizer_of_a_larger_vocabulary_is_refused(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["beyond"] = VOCAB
    path.write_text(json.dumps(tokenizer))
    assert f"vocab_size is {VOCAB}, and the tokenizer's vocabulary has token id {VOCAB}" in refused(folder)


def test_what_a_tokenizer_adds_may_lie_beyond_the_embedding(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"].append({"id": VOCAB + 3, "content": "<image>", "special": True})
    path.write_text(json.dumps(tokenizer))
    require_consumed(open_checkpoint(folder))


@pytest.mark.parametrize("damage", ["{}", '{"model": {"vocab": 7}}', '{"model": {"vocab": {"a": "b"}}}'])
def test_a_tokenizer_that_does_not_say_its_vocabulary_is_left_to_its_own_check(folder: Path, damage: str) -> None:
    (folder / "tokenizer.json").write_text(damage)
    require_consumed(open_checkpoint(folder))


CUSTOM = {"AutoConfig": "configuration_odd.OddConfig", "AutoModelForCausalLM": "modeling_odd.OddForCausalLM"}


def test_code_of_a_checkpoint_is_never_run(folder: Path) -> None:
    say(folder, {"model_type": "odd", "auto_map": CUSTOM})
    for name in ("configuration_odd", "modeling_odd", "tokenization_odd"):
        (folder / f"{name}.py").write_text("raise SystemExit('it ran')")
    say(folder, {"auto_map": {"AutoTokenizer": ["tokenization_odd.OddTokenizer", None]}}, "tokenizer_config.json")
    said = refused(folder)
    assert said.startswith("architecture 'odd' is not supported; supported: ")
    assert "Its checkpoint brings custom code (auto_map: configuration_odd.OddConfig, modeling_odd.Odd" in said


def test_a_supported_architecture_needs_none_of_it_and_is_transformers_own(folder: Path) -> None:
    say(folder, {"auto_map": CUSTOM})
    (folder / "modeling_odd.py").write_text("raise SystemExit('it ran')")
    options = CompileOptions("cpu", quantize="none", verify="none")
    compile_bundle(str(folder), folder / "bundle", tiny.kinds_plan(), options, Store(folder / "store"), str)
