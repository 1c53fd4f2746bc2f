"""Tokenizers of three kinds, as models have them, trained on lines in many scripts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

LINES = (Path(__file__).parents[2] / "data" / "multilingual.txt").read_text(encoding="utf-8").splitlines()
END = "<|end|>"


def byte_level(size: int) -> Backend:
    """GPT-2's: bytes, merged."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(LINES, trainer)
    return backend


def byte_fallback(size: int) -> Backend:
    """Llama 2's: words behind ▁, and bytes for what the vocabulary lacks, which is all that is not Latin."""
    plain = Backend(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trainer: Any = trainers.BpeTrainer(vocab_size=size - 256, special_tokens=["<unk>", "<s>", END], show_progress=False)
    plain.train_from_iterator(LINES[:5], trainer)
    built = json.loads(plain.to_str())
    model = built["model"]
    pieces = [*sorted(model["vocab"], key=model["vocab"].__getitem__), *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [tuple(pair) for pair in model["merges"]]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", END])
    start = vocabulary["<s>"]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    return backend


def unigram(size: int) -> Backend:
    """T5's and Gemma's kind: pieces of text behind ▁."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    backend.decoder = decoders.Metaspace(prepend_scheme="always", split=True)
    trainer: Any = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=["<unk>", END], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(LINES, trainer)
    return backend


def word_piece(size: int) -> Backend:
    """BERT's: ##continuations, spaces put back between words."""
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer: Any = trainers.WordPieceTrainer(vocab_size=size, special_tokens=["<unk>", END], show_progress=False)
    backend.train_from_iterator(LINES, trainer)
    return backend


KINDS: dict[str, Callable[[int], Backend]] = {
    "byte-level BPE": byte_level, "BPE with byte fallback": byte_fallback, "Unigram": unigram, "WordPiece": word_piece,
}  # fmt: skip


@cache
def backend(kind: str, size: int = 600) -> Backend:
    """A tokenizer of a kind, of so many tokens at most."""
    return KINDS[kind](size)
