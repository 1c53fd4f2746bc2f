"""Tokenizers from GGUF metadata, over text in many languages, beside what transformers makes of the same file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2

from llmc.compiler.checkpoint import open_checkpoint
from llmc.runtime.text.chat import ChatTemplate
from tests.compiler.checkpoint.writers import HIDDEN, weights, write_gguf
from tests.tiers import full

LINES = json.loads((Path(__file__).parents[1] / "data" / "multilingual.json").read_text(encoding="utf-8"))
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SIZE = 700


def own(path: Path) -> Tokenizer:
    return Tokenizer.from_str(open_checkpoint(path).tokenizer_json().decode())


def transformers_own(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def ids(tokenizer: Tokenizer, text: str) -> Sequence[int]:
    found: Sequence[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return found


LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
"""As in Llama 3's tokenizer.json."""
SPLITS: Mapping[str, list[Any]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "qwen2": [pre_tokenizers.Split(Regex(QWEN2), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)],
    "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)],
}
"""tokenizer.ggml.pre: how the models that it is named after split text."""


@pytest.fixture(scope="module")
def demo() -> Any:
    """The demo model's, with the digits apart, as its tokenizer.json has them and transformers' conversion has not."""
    built = transformers_own(open_checkpoint("smollm2-demo").path)
    built.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(SPLITS["smollm"])
    return built


@full
@pytest.mark.real_weights
def test_the_demo_model_s_tokens_are_those_of_transformers(demo: Any) -> None:
    tokenizer = own(open_checkpoint("smollm2-demo").path)
    for text in [*LINES, "\n".join(LINES)]:
        found = ids(tokenizer, text)
        assert found == demo(text, add_special_tokens=False).input_ids, text
        assert tokenizer.decode(found, skip_special_tokens=True) == demo.decode(found, skip_special_tokens=True)
        assert tokenizer.decode(found, skip_special_tokens=False) == text


@full
@pytest.mark.real_weights
def test_the_demo_model_s_chat_is_that_of_transformers(demo: Any) -> None:
    checkpoint = open_checkpoint("smollm2-demo")
    template = ChatTemplate(checkpoint.chat_template(), checkpoint.special_tokens())
    roles = ("user", "assistant")
    chat = [{"role": roles[i % 2], "content": line} for i, line in enumerate(LINES[:-1])]
    for messages in (chat, [{"role": "system", "content": LINES[11]}, *chat]):
        wanted = demo.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert template.render(messages) == wanted


@pytest.mark.parametrize("pre", list(SPLITS))
def test_tokens_of_a_trained_byte_level_vocabulary_are_its_own_and_transformers(pre: str, tmp_path: Path) -> None:
    trained = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    trained.pre_tokenizer, trained.decoder = pre_tokenizers.Sequence(SPLITS[pre]), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=SIZE, special_tokens=list(CONTROL), initial_alphabet=alphabet)
    )
    described = json.loads(trained.to_str())["model"]
    path = written(tmp_path, described["vocab"], pre=pre, merges=[" ".join(pair) for pair in described["merges"]])
    tokenizer, reference = own(path), transformers_own(path)
    for text in LINES:
        found = ids(tokenizer, text)
        assert found == ids(trained, text), text
        assert tokenizer.decode(found, skip_special_tokens=False) == text
        if pre != "smollm":  # transformers leaves digits together there
            assert found == reference(text, add_special_tokens=False).input_ids, text


def test_tokens_of_a_trained_sentence_piece_vocabulary_are_those_of_transformers(tmp_path: Path) -> None:
    control = ["<s>", "</s>", *CONTROL]
    special = ["<unk>", *control, *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = Tokenizer(models.BPE())
    trained.normalizer = spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=SIZE + len(special), special_tokens=special, max_token_length=12)
    )
    vocabulary = trained.get_vocab()
    scores = [-float(index) for index in range(len(vocabulary))]
    path = written(
        tmp_path, vocabulary, model="llama", pre="default", scores=scores,
        types=[2] + [3] * len(control) + [6] * 256 + [1] * (len(vocabulary) - len(special)),
    )  # fmt: skip
    tokenizer, reference = own(path), transformers_own(path)
    # a space before each piece between special tokens, as in models' tokenizer.json and llama.cpp
    reference.backend_tokenizer.normalizer, reference.backend_tokenizer.pre_tokenizer = spaces, None
    for text in LINES:
        found = ids(tokenizer, text)
        assert found == reference(text, add_special_tokens=False).input_ids, text
        if not any(token in text for token in control):
            assert tokenizer.decode(found, skip_special_tokens=False) == text


def written(folder: Path, vocabulary: Mapping[str, int], **more: Any) -> Path:
    """A GGUF file of this vocabulary, special tokens first."""
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    types = [3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL))
    embedding = {"model.embed_tokens.weight": np.zeros((len(tokens), HIDDEN), np.float32)}
    return write_gguf(folder / "m.gguf", weights() | embedding, tokenizer={"tokens": tokens, "types": types, **more})
