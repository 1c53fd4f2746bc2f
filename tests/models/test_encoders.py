"""Every family that embeds: ragged batches with poisoned padding against transformers, in float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import llmc
from llmc.errors import CheckpointError
from llmc.testing.toy import tokenizer_json
from tests.compiler.encoders_tiny import ARCHITECTURES, config_of, write_encoder
from tests.tiers import default_cases, full


@default_cases(1)
@pytest.mark.parametrize("encoder", ARCHITECTURES)
def test_states_are_those_of_transformers(encoder: str, tmp_path: Path) -> None:
    model = write_encoder(tmp_path / "model", encoder)
    for device in ("openvino", "onnxruntime"):
        built = llmc.compile(
            model, tmp_path / device, device=device, dtype="f32", task="embed", max_num_seqs=3, max_model_len=40,
            cache_dir=tmp_path / "store",
        )  # fmt: skip
        assert built.verification["cosine"] > 0.99999
        assert built.verification["leak"] <= 1e-5
        assert built.verification["rows"] >= 6


def judge(folder: Path, tokenizer: str) -> Path:
    fields = config_of("qwen3")
    fields.pop("model_type")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **fields)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer)
    return folder


def with_words(*words: str) -> str:
    fields = json.loads(tokenizer_json())
    vocabulary = fields["model"]["vocab"]
    for at, word in enumerate(words):  # in place of two bytes that no text of the test has
        byte = next(token for token, index in vocabulary.items() if index == 200 + at)
        vocabulary[word] = vocabulary.pop(byte)
    return json.dumps(fields)


@full
def test_a_decoder_scores_by_yes_against_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.compiler.checkpoint import sentence_files

    monkeypatch.setattr(sentence_files, "_RERANKER", ("J ", " D ", " A"))
    monkeypatch.setattr(sentence_files, "_INSTRUCTION", "i")
    folder = judge(tmp_path / "model", with_words("no", "yes"))
    llmc.compile(
        folder, tmp_path / "bundle", device="openvino", dtype="f32", task="score", max_num_seqs=2,
        cache_dir=tmp_path / "store",
    )  # fmt: skip
    with llmc.LLM(tmp_path / "bundle") as llm:
        (found,) = llm.score("q", "d")
        assert llm.pooler.description.template == ("J ", " D ", " A")
    from llmc.runtime.text.tokenizer import Tokenizer

    ids = Tokenizer((folder / "tokenizer.json").read_bytes()).encode("J <Instruct>: i\n<Query>: q D d A")
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder).eval()(torch.tensor([ids])).logits[0, -1]
    wanted = torch.softmax(logits[[200, 201]], 0)[1]
    assert found.outputs.score == pytest.approx(float(wanted), abs=1e-5)


def test_a_decoder_without_words_to_judge_by_is_no_reranker(tmp_path: Path) -> None:
    folder = judge(tmp_path / "model", tokenizer_json())
    with pytest.raises(CheckpointError, match="logits of no and yes, which its tokenizer has no tokens for"):
        llmc.compile(folder, tmp_path / "bundle", device="openvino", task="score", cache_dir=tmp_path / "store")
