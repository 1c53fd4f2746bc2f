"""From a checkpoint folder in shards, as hubs have them, to a chat's text: with transformers' tokenizer and model."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import jinja2
import pytest
from transformers import AutoTokenizer

import llmc
from llmc.compiler.checkpoint.huggingface import INDEX
from llmc.errors import ArtifactError, CheckpointError
from tests.compiler import tiny

ARCHITECTURE = "mistral"
MESSAGES = [{"role": "user", "content": "Rivers?"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The tensors lie in several files."""
    model = tiny.write_model(tmp_path / "model", ARCHITECTURE)
    (model / "model.safetensors").unlink()
    config = (model / "config.json").read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tiny.model(ARCHITECTURE).save_pretrained(model, max_shard_size="60KB")
    (model / "config.json").write_bytes(config)
    (model / "generation_config.json").unlink(missing_ok=True)
    assert len(list(model.glob("model-*-of-*.safetensors"))) > 2
    return model


def test_a_folder_in_shards_becomes_the_text_of_a_chat(folder: Path, tmp_path: Path) -> None:
    plan, bundle = tiny.tiny_plan(), tmp_path / "bundle"
    llmc.compile(str(folder), bundle, plan=plan, quantize="none", device="onnxruntime")
    with llmc.LLM(str(bundle)) as llm:
        sampling = llmc.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        (output,) = llm.chat(MESSAGES, sampling)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    text = jinja2.Template(template).render(messages=MESSAGES, add_generation_prompt=True)
    assert output.prompt_token_ids == tokenizer.encode(text, add_special_tokens=False)
    built = output.outputs[0]
    assert built.token_ids == tiny.greedy(ARCHITECTURE, output.prompt_token_ids, 8)
    assert built.text == tokenizer.decode(built.token_ids, skip_special_tokens=True)


def test_a_shard_that_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    missing = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))[1]
    (folder / missing).unlink()
    with pytest.raises(CheckpointError, match=rf"shards are missing: {missing}; finish the download"):
        llmc.compile(str(folder), tmp_path / "bundle", plan=tiny.tiny_plan(), device="onnxruntime")
    assert not (tmp_path / "bundle").exists()


def test_without_a_tokenizer_a_bundle_takes_token_ids_and_says_so_of_text(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    bundle = tmp_path / "bundle"
    llmc.compile(str(folder), bundle, plan=tiny.tiny_plan(), quantize="none", verify="none", device="onnxruntime")
    with llmc.LLM(str(bundle)) as llm:
        (output,) = llm.generate([[5, 80, 3]], llmc.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
        assert output.outputs[0].token_ids == tiny.greedy(ARCHITECTURE, [5, 80, 3], 4)
        with pytest.raises(ArtifactError, match="no tokenizer in the bundle; pass token ids instead of text"):
            llm.generate(["text"], llmc.SamplingParams(max_tokens=1))
