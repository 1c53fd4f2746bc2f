"""tokenizer.json from GGUF metadata, against ids that llama.cpp gave (tests/compiler/data/README.md)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.checkpoint.gguf_config import Metadata
from llmc.compiler.checkpoint.gguf_file import read_header
from llmc.compiler.checkpoint.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer_json
from llmc.errors import CheckpointError
from tests.compiler.checkpoint.writers import MERGES, TOKENS, write_gguf
from tests.tiers import default_cases

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "gguf_tokenizers.json").read_text())


def tokenizer_of(path) -> Tokenizer:
    return Tokenizer.from_str(open_checkpoint(path).tokenizer_json().decode())


@default_cases(2)
@pytest.mark.real_weights
@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_byte_level_ids_are_those_of_llama_cpp(pre):
    header = read_header(open_checkpoint("smollm2-demo").path)
    metadata = header.metadata | {"tokenizer.ggml.pre": pre}
    if pre != "smollm":
        types = metadata["tokenizer.ggml.token_type"].copy()
        types[[4, 30000]] = 4
        metadata["tokenizer.ggml.token_type"] = types
    data = build_tokenizer_json(Metadata(replace(header, metadata=metadata)))
    tokenizer = Tokenizer.from_str(data.decode())
    for text, ids in GOLDEN[pre]:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        assert encoding.ids == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    if pre == "smollm":
        assert data == open_checkpoint("smollm2-demo").tokenizer_json()


def test_sentence_piece_ids_are_those_of_llama_cpp(tmp_path):
    pieces = GOLDEN["sentencepiece"]["tokens"]
    vocabulary = {
        "model": "llama",
        "pre": "default",
        "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<|user|>"],
        "types": [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [4],
        "scores": [0.0] * 259 + [-float(index) for index in range(len(pieces))] + [-1000.0],
    }
    extra = {"tokenizer.ggml.unknown_token_id": 0}
    tokenizer = tokenizer_of(write_gguf(tmp_path / "m.gguf", tokenizer=vocabulary, extra=extra))
    for text, ids in GOLDEN["sentencepiece"]["cases"]:
        assert tokenizer.encode(text).ids == ids, text
    assert tokenizer.decode(tokenizer.encode("über 😀 fox").ids) == "über 😀 fox"


def test_control_tokens_are_special_and_user_tokens_are_not(tmp_path):
    types = [3, 4] + [1] * (len(TOKENS) - 2)
    tokenizer = tokenizer_of(write_gguf(tmp_path / "m.gguf", tokenizer={"types": types}))
    ids = tokenizer.encode("ab<|user|> a<|end|>", add_special_tokens=False).ids
    assert [TOKENS[index] for index in ids] == ["ab", "<|user|>", "Ġa", "<|end|>"]
    assert tokenizer.decode(ids) == "ab<|user|> a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "ab<|user|> a<|end|>"


@pytest.mark.parametrize(
    ("pre", "flag", "begins"),
    [("smollm", None, False), ("smollm", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_bos_is_added_as_the_file_or_else_the_family_says(tmp_path, pre, flag, begins):
    extra = {} if flag is None else {"tokenizer.ggml.add_bos_token": flag}
    tokenizer = tokenizer_of(write_gguf(tmp_path / "m.gguf", tokenizer={"pre": pre}, extra=extra))
    ids = tokenizer.encode("ab").ids
    assert ids == ([1] if begins else []) + [TOKENS.index("ab")]
    assert tokenizer.encode("ab", add_special_tokens=False).ids == [TOKENS.index("ab")]


def test_eos_is_added_where_the_file_says(tmp_path):
    extra = {"tokenizer.ggml.add_eos_token": True}
    tokenizer = tokenizer_of(write_gguf(tmp_path / "m.gguf", extra=extra))
    assert tokenizer.encode("ab").ids == [TOKENS.index("ab"), 0]


def test_the_bytes_are_the_same_every_time(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    assert open_checkpoint(path).tokenizer_json() == open_checkpoint(path).tokenizer_json()


@pytest.mark.parametrize(
    ("vocabulary", "extra", "message"),
    [
        ({"pre": "mystery"}, {}, r"pre-tokenizer 'mystery' .* supported: gpt-2, phi-2"),
        ({"model": "bert"}, {}, "tokenizer.ggml.model 'bert' is not supported; supported: gpt2, gemma4, llama"),
        ({"merges": [*MERGES, "x y"]}, {}, "vocabulary and merges do not fit together"),
        ({"merges": ["ab"]}, {}, "merge 'ab' is not two parts"),
        ({"types": [3, 3]}, {}, "does not have one value for each of"),
        ({"model": "llama"}, {}, "tokenizer.ggml.scores does not have one value"),
        (
            {},
            {"tokenizer.ggml.bos_token_id": 999, "tokenizer.ggml.add_bos_token": True},
            "bos_token_id is 999",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(tmp_path, vocabulary, extra, message):
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tokenizer=vocabulary, extra=extra))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.tokenizer_json()


def test_every_rule_builds(tmp_path):
    for pre in PRE_TOKENIZERS:
        tokenizer = tokenizer_of(write_gguf(tmp_path / "m.gguf", tokenizer={"pre": pre}))
        assert tokenizer.encode("ab a", add_special_tokens=False).tokens[0] == "ab"
