"""Build a Hugging Face tokenizer.json from the vocabulary in a GGUF file.

tokenizer.ggml.model "gpt2" is BPE with the splitting rule named by tokenizer.ggml.pre, "gemma4" is BPE with a rule of
its own. "llama" is SentencePiece BPE, whose merges follow from the scores. Token types: 1 normal, 2 unknown, 3 control,
4 user-defined, 5 unused, 6 byte. Control tokens are special and matched before anything else, like llama.cpp with
parse_special.

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
_LINES, _ENDS = r"\s*[\r\n]+", r"\s+(?!\S)|\s+"
_SPACES = f"{_LINES}|{_ENDS}"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DIGIT, _THREE_DIGITS = r"\p{N}", "[0-9][0-9][0-9]"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_HAN = "[一-龥぀-ゟ゠-ヿ]+"
_ASCII_WORDS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ"
    "-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-"
    "\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    "\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters with a case, as deepseek-llm lists them."""
_SPACE_MARK = "\u2581"


@dataclass(frozen=True)
class PreTokenizerRule:
    """How a model splits text before BPE, and its defaults for missing metadata."""

    patterns: tuple[str, ...] = ()
    """Each splits the pieces that the ones before it leave, at its matches and between them."""
    gpt2: bool = False
    """Split by GPT-2's pattern at last."""
    ignore_merges: bool = False
    """A word that is one token is taken without merging."""
    add_bos: bool = False
    bytes: bool = True
    """Tokens are bytes in GPT-2's alphabet; else text, with a mark for each space and byte tokens for what is left."""


def _split(numbers: str, *, words: str = _WORDS, symbols: str = _SYMBOLS) -> str:
    return "|".join((_CONTRACTIONS, words, numbers, symbols, _SPACES))


def _cased(contractions: str, numbers: str) -> str:
    """Words end where a capital follows a small letter."""
    first, rest = r"[^\r\n\p{L}\p{N}]?", f"|{numbers}| ?[^\\s\\p{{L}}\\p{{N}}]+[\\r\\n/]*|{_SPACES}"
    return f"{first}{_UPPER}*{_LOWER}+{contractions}|{first}{_UPPER}+{_LOWER}*{contractions}{rest}"


_RULES: dict[tuple[str, ...], PreTokenizerRule] = {
    ("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum", "modern-bert",
     "jina-v1-en", "jina-v2-code", "roberta-bpe", "exaone4", "mpt", "olmo", "jais", "trillion", "granite-docling"):
        PreTokenizerRule(gpt2=True),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"):
        PreTokenizerRule((_DIGIT,), gpt2=True),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"):
        PreTokenizerRule((_split(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True),
    ("dbrx", "smaug-bpe", "chatglm-bpe"): PreTokenizerRule((_split(r"\p{N}{1,3}"),)),
    ("glm4", "glm5"): PreTokenizerRule((_split(r"\p{N}{1,3}"),), ignore_merges=True),
    ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "stablelm2", "megrez", "hunyuan", "solar-open", "grok-2"):
        PreTokenizerRule((_split(_DIGIT),)),
    ("qwen35",): PreTokenizerRule((_split(
        _DIGIT, words=r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", symbols=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    ),)),
    ("seed-coder",): PreTokenizerRule((_split(_DIGIT, symbols=r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    ("minicpm5",): PreTokenizerRule((r"\p{N}{1,3}", _split(r"\p{N}+")), ignore_merges=True),
    ("deepseek-llm",): PreTokenizerRule((
        "[\r\n]",
        f"\\s?[{_CASED}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-퟿]+", r"\p{N}+",
    )),
    ("deepseek-coder",): PreTokenizerRule(
        ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT)
    ),
    ("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"): PreTokenizerRule(
        (r"\p{N}{1,3}", _HAN, f"{_ASCII_WORDS}| ?[\\p{{P}}\\p{{S}}]+[\r\n]*|{_SPACES}")
    ),
    ("falcon",): PreTokenizerRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, _THREE_DIGITS)),
    ("default",): PreTokenizerRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", _THREE_DIGITS)),
    ("tekken",): PreTokenizerRule((_cased("", _DIGIT),), ignore_merges=True, add_bos=True),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): PreTokenizerRule(
        (_cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),)
    ),
    ("granite-embed-multi-97m",): PreTokenizerRule(
        (_cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),), ignore_merges=True
    ),
    ("superbpe",): PreTokenizerRule((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    ("bailingmoe", "bailingmoe2", "llada-moe"): PreTokenizerRule((
        rf"'(?i:[sdmt]|ll|ve|re)|{_WORDS}|{_DIGIT}|{_SYMBOLS}|\s*[\r\n]|{_ENDS}",
    )),
    ("gemma4", "granite-embed-multi-311m", "sarvam-moe"): PreTokenizerRule((r"[^\n]+|[\n]+",), bytes=False),
}  # fmt: skip
PRE_TOKENIZERS = {name: rule for names, rule in _RULES.items() for name in names}
"""Value of tokenizer.ggml.pre → its rule. Source: llama.cpp, src/llama-vocab.cpp (llm_tokenizer_bpe), and the models'
own tokenizer.json files where it adapts their patterns."""


def build_tokenizer_json(meta: Metadata) -> bytes:
    """Build the tokenizer, the same bytes for the same metadata. Raises CheckpointError for a damaged vocabulary."""
    vocabulary = _Vocabulary(meta)
    model = meta.text("tokenizer.ggml.model", "none")
    if model in ("gpt2", "gemma4"):
        name = "gemma4" if model == "gemma4" else meta.text("tokenizer.ggml.pre", "default")
        tokenizer, adds_bos = _merged(vocabulary, name)
    elif model == "llama":
        prefix = vocabulary.flag("tokenizer.ggml.add_space_prefix", True)
        tokenizer, adds_bos = _of_text(vocabulary, _merges_from_scores(vocabulary), prefix), True
    else:
        error = meta.error(f"tokenizer.ggml.model {model!r} is not supported; supported: gpt2, gemma4, llama")
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


def _merged(vocabulary: _Vocabulary, name: str) -> tuple[Tokenizer, bool]:
    meta, rule = vocabulary.meta, PRE_TOKENIZERS.get(name)
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
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns]
    if rule.bytes:
        tokenizer = Tokenizer(_bpe(meta, vocab=vocabulary.ids, merges=merges, ignore_merges=rule.ignore_merges))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.gpt2))
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer = _of_text(vocabulary, merges, prefix=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer, rule.add_bos


def _of_text(vocabulary: _Vocabulary, merges: list[tuple[str, str]], prefix: bool) -> Tokenizer:
    """Tokens are text with a mark for each space, and bytes of other characters. `prefix`: add a space at first."""
    unknown = vocabulary.special("unknown")
    tokenizer = Tokenizer(
        _bpe(
            vocabulary.meta,
            vocab=vocabulary.ids,
            merges=merges,
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
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
