"""Checkpoints written as GGUF read back as they were, to float16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.baselines.gguf_file import interleaved, write_gguf
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.checkpoint.folder_writer import write_folder
from llmc.errors import CheckpointError
from llmc.testing.toy import write_toy
from tests.compiler import tiny


def edit(folder: Path, name: str, **members: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | members))


def write_model(folder: Path, name: str) -> Path:
    """A tiny model whose tokenizer has a merge, which GGUF cannot do without: "he" in place of one byte."""
    tiny.write_model(folder, name)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model = tokenizer["model"]
    model["vocab"] = {"he" if token == "\u0100" else token: index for token, index in model["vocab"].items()}
    model["merges"] = [["h", "e"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "llama-wide-heads-without-groups"])
def test_a_checkpoint_reads_back_from_gguf(name: str, tmp_path: Path) -> None:
    source = open_checkpoint(write_model(tmp_path / "hf", name))
    write_gguf(source, tmp_path / "out.gguf")
    found = open_checkpoint(tmp_path / "out.gguf")
    assert found.tensor_names() == source.tensor_names()
    for tensor in found.tensor_names():
        np.testing.assert_allclose(found.tensor(tensor), source.tensor(tensor), rtol=2e-3, atol=2e-4)
    for member in (
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "vocab_size",
    ):
        assert found.config[member] == source.config[member], member
    assert found.chat_template() == source.chat_template()
    assert found.generation_config()["eos_token_ids"] == source.generation_config()["eos_token_ids"]


def test_its_tokenizer_reads_back(tmp_path: Path) -> None:
    from llmc.runtime.text.tokenizer import Tokenizer

    source = open_checkpoint(write_model(tmp_path / "hf", "llama"))
    write_gguf(source, tmp_path / "out.gguf")
    found = open_checkpoint(tmp_path / "out.gguf")
    for text in ("Hello, world 42!", "a\nb<|end|>"):
        assert Tokenizer(found.tokenizer_json()).encode(text) == Tokenizer(source.tokenizer_json()).encode(text)


def test_a_tied_head_is_written_once(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hf", tiny.TIED)
    edit(folder, "config.json", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    write_gguf(open_checkpoint(folder), tmp_path / "out.gguf")
    assert open_checkpoint(tmp_path / "out.gguf").config["tie_word_embeddings"]


def test_rows_of_q_are_halves_in_turn() -> None:
    """Two heads of four rows: 0 1 2 3 becomes 0 2 1 3 in each."""
    assert interleaved(np.arange(8)[:, None], 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_another_architecture_scaling_or_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no GGUF file is written of architecture 'toy'; supported: llama"):
        write_gguf(open_checkpoint(write_toy(tmp_path / "toy")), tmp_path / "out.gguf")
    scaled = open_checkpoint(write_model(tmp_path / "scaled", "llama-one-kv-head-linear-rope"))
    with pytest.raises(CheckpointError, match="rotary scaling 'linear'"):
        write_gguf(scaled, tmp_path / "out.gguf")
    folder = write_model(tmp_path / "unigram", "llama")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["decoder"] = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="a tokenizer of type"):
        write_gguf(open_checkpoint(folder), tmp_path / "out.gguf")


def test_a_folder_for_transformers_has_the_same_weights_and_tokenizer(tmp_path: Path) -> None:
    source = open_checkpoint(write_model(tmp_path / "hf", "llama"))
    write_gguf(source, tmp_path / "out.gguf")
    write_folder(open_checkpoint(tmp_path / "out.gguf"), tmp_path / "again")
    found = open_checkpoint(tmp_path / "again")
    assert found.tensor_names() == source.tensor_names()
    np.testing.assert_allclose(
        found.tensor("model.layers.0.self_attn.q_proj.weight"), source.tensor("model.layers.0.self_attn.q_proj.weight"),
        rtol=2e-3, atol=2e-4,
    )  # fmt: skip
    assert found.config["model_type"] == "llama" and found.config["architectures"] == ["LlamaForCausalLM"]
    assert found.chat_template() == source.chat_template()
