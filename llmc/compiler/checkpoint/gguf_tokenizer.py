"""Build a Hugging Face tokenizer.json from the vocabulary in a GGUF file.

tokenizer.ggml.model "gpt2" is byte-level BPE with the splitting rule named by tokenizer.ggml.pre. "llama" is
SentencePiece BPE, whose merges follow from the scores. Token types: 1 normal, 2 unknown, 3 control, 4 user-defined, 5
unused, 6 byte. Control tokens are special and matched before anything else, like llama.cpp with parse_special.

The rules were checked token for token against llama.cpp (tests/compiler/data/README.md). Split patterns are those of
the models' own tokenizer.json files.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from llmc.compiler.checkpoint.gguf_config import Metadata
from llmc.errors import NoTokenizerError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SPACE_MARK = "\u2581"


@dataclass(frozen=True)
class PreTokenizerRule:
    """How a model splits text before BPE, and its defaults for missing metadata."""

    digits: bool = False
    """Split each digit, before GPT-2's pattern."""
    pattern: str | None = None
    """A pattern that replaces GPT-2's."""
    ignore_merges: bool = False
    """A word that is one token is taken without merging."""
    add_bos: bool = False


def _split(numbers: str) -> str:
    return "|".join((_CONTRACTIONS, _WORDS, numbers, _SYMBOLS, _SPACES))


_GPT2 = PreTokenizerRule()
_SMOLLM = PreTokenizerRule(digits=True)
_LLAMA3 = PreTokenizerRule(pattern=_split(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizerRule(pattern=_split(r"\p{N}"))

PRE_TOKENIZERS = {
    "gpt-2": _GPT2, "smollm": _SMOLLM, "starcoder": _SMOLLM, "refact": _SMOLLM, "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3, "llama-v3": _LLAMA3, "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2,
}  # fmt: skip
"""Value of tokenizer.ggml.pre → its rule."""


def build_tokenizer_json(meta: Metadata) -> bytes:
    """Build the tokenizer, the same bytes for the same metadata. Raises CheckpointError for a damaged vocabulary."""
    vocabulary = _Vocabulary(meta)
    model = meta.text("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(vocabulary)
    elif model == "llama":
        tokenizer, adds_bos = _sentence_piece(vocabulary), True
    else:
        error = meta.error(f"tokenizer.ggml.model {model!r} is not supported; supported: gpt2, llama")
        raise NoTokenizerError(str(error))
    added = vocabulary.added_tokens()
    tokenizer.add_special_tokens([token for token, special in added if special])
    tokenizer.add_tokens([token for token, special in added if not special])
    _add_template(tokenizer, vocabulary, adds_bos)
    return str(tokenizer.to_str()).encode()


@dataclass(frozen=True)
class _Vocabulary:
    meta: Metadata

    @cached_property
    def tokens(self) -> list[str]:
        return self.meta.strings("tokenizer.ggml.tokens")

    @cached_property
    def ids(self) -> dict[str, int]:
        """Token text: id. Equal texts get the first id, as in llama.cpp."""
        ids: dict[str, int] = {}
        for index, token in enumerate(self.tokens):
            ids.setdefault(token, index)
        return ids

    def numbers(self, key: str) -> np.ndarray[Any, Any]:
        values = self.meta.get(key)
        if not isinstance(values, np.ndarray) or len(values) != len(self.tokens):
            raise self.meta.error(f"damaged: {key} does not have one value for each of {len(self.tokens)} tokens")
        return values

    def added_tokens(self) -> list[tuple[AddedToken, bool]]:
        """Tokens that are matched before the model: (token, special)."""
        if self.meta.get("tokenizer.ggml.token_type") is None:
            return []
        types = self.numbers("tokenizer.ggml.token_type")
        chosen = np.flatnonzero(np.isin(types, (_UNKNOWN, _CONTROL, _USER_DEFINED)))
        return [
            (AddedToken(self.tokens[i], special=special, normalized=False), special)
            for i, special in ((int(i), types[i] != _USER_DEFINED) for i in chosen)
            if self.tokens[i] and self.ids[self.tokens[i]] == i
        ]

    def special(self, short: str) -> tuple[str, int] | None:
        """Text and id of the bos, eos or unknown token, if the file names one."""
        key = f"tokenizer.ggml.{short}_token_id"
        if self.meta.get(key) is None:
            return None
        index = self.meta.integer(key, least=0)
        if index >= len(self.tokens):
            raise self.meta.error(f"damaged: {key} is {index}, but there are {len(self.tokens)} tokens")
        return self.tokens[index], index

    def flag(self, key: str, default: bool) -> bool:
        value = self.meta.get(key)
        return default if value is None else bool(value)


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    meta = vocabulary.meta
    name = meta.text("tokenizer.ggml.pre", "")
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        error = meta.error(
            f"pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; supported: "
            f"{', '.join(PRE_TOKENIZERS)}; "
            "use the Hugging Face folder of this model, which has a tokenizer.json"
        )
        raise NoTokenizerError(str(error))
    merges = []
    for line in meta.strings("tokenizer.ggml.merges"):
        left, separator, right = line.partition(" ")
        if not (left and separator and right):
            raise meta.error(f"damaged: tokenizer merge {line!r} is not two parts; fetch it again")
        merges.append((left, right))
    tokenizer = Tokenizer(_bpe(meta, vocab=vocabulary.ids, merges=merges, ignore_merges=rule.ignore_merges))
    if rule.pattern is not None:
        steps = [
            pre_tokenizers.Split(Regex(rule.pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    else:
        steps = [pre_tokenizers.Digits(individual_digits=True)] if rule.digits else []
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.add_bos


def _sentence_piece(vocabulary: _Vocabulary) -> Tokenizer:
    meta = vocabulary.meta
    unknown = vocabulary.special("unknown")
    tokenizer = Tokenizer(
        _bpe(
            meta,
            vocab=vocabulary.ids,
            merges=_merges_from_scores(vocabulary),
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = vocabulary.flag("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend(_SPACE_MARK)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE_MARK)])
    tail: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *tail]
    )
    return tokenizer


def _merges_from_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every split of a token into two tokens, best score first, as SentencePiece merges them."""
    scores = vocabulary.numbers("tokenizer.ggml.scores")
    ids = vocabulary.ids
    merges = [
        (-float(scores[index]), ids[token[:cut]], ids[token[cut:]], (token[:cut], token[cut:]))
        for token, index in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [pair for *_, pair in sorted(merges)]


def _bpe(meta: Metadata, **arguments: Any) -> BPE:
    try:
        return BPE(**arguments)
    except Exception as error:  # tokenizers raises bare Exception, e.g. for a merge of tokens it does not have
        raise meta.error(f"damaged: vocabulary and merges do not fit together ({error}); fetch it again") from error


def _add_template(tokenizer: Tokenizer, vocabulary: _Vocabulary, adds_bos: bool) -> None:
    bos = vocabulary.special("bos") if vocabulary.flag("tokenizer.ggml.add_bos_token", adds_bos) else None
    eos = vocabulary.special("eos") if vocabulary.flag("tokenizer.ggml.add_eos_token", False) else None
    around = [token for token in (bos, eos) if token]
    if not around:
        return
    before, after = ([bos[0]] if bos else []), ([eos[0]] if eos else [])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B:1", *after],
        special_tokens=around,
    )
