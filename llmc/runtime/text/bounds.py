"""Bounds on the cost of an untrusted tokenizer.json: text growth, and whether time is linear in the text's length.

A checkpoint defines its tokenizer's steps, which tokenizers runs in native code. An allocation that fails aborts the
process, and a backtracking regular expression can hold a thread for hours. Both are therefore judged from the steps,
before any text is encoded:

growth    the bytes that one character can become, as a product over the steps. More than `MOST_GROWTH` is rejected. A
          text may be encoded in this process while `growth` times its length is at most `MOST_BYTES`.
regular   whether each expression takes time in proportion to the text. Texts of other tokenizers are encoded in a child
          process with limits (confined_encoding.py).

Bounds of Unicode's own forms: https://unicode.org/faq/normalization.html#12 and CaseFolding.txt.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmc.errors import ArtifactError

MOST_GROWTH = 1024
"""Bytes that one character may become. Published tokenizers reach 200 (nmt_nfkc, then spaces as "▁")."""
_ORDINARY = 64
"""Bytes per character of an ordinary tokenizer (`Bounds.cost`)."""
MOST_BYTES = 4 << 20
"""Bytes that a text may become in this process. tokenizers takes about 40 bytes of memory for each, and up to 2 s."""
MOST_STEPS = 64
"""The largest number of steps of one kind; each reads the whole text."""
MOST_PATTERN = 2048
"""The longest expression, in characters; each branch may be tried at each character of a text."""
MOST_AFFIX = 64
"""Characters that a model may add before or after each part of a word."""
MOST_ADDED = 256
"""Ids that a post-processor may add to a text."""
MOST_WORD = 1024
"""Characters of a word that WordPiece may process; its time is quadratic in this."""

_UTF8 = 4
_FORMS = {
    "NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "Nmt": 1, "Strip": 1, "StripAccents": 1,
    "BertNormalizer": 4 * 3 * 3, "ByteLevel": 2,
}  # fmt: skip
"""Growth factors of normalizers that Unicode bounds. BertNormalizer: NFD, lower case, spaces around CJK."""
_DIVIDING = {
    "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace", "Punctuation", "Split",
    "UnicodeScripts", "Whitespace", "WhitespaceSplit",
}  # fmt: skip
_JOINING = {"BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}

_ATOM = r"(?:\\[pP]\{\^?\w+\}|\\[^\dkgKXR]|\[(?:\\.|[^\]\\\[])*\]|[^\\\[\](){}|?*+^$])"
_FEW = rf"{_ATOM}(?:\?|\{{\d(?:,\d)?\}})"
_SIMPLE = re.compile(rf"(?:{_ATOM})*(?:{_FEW}(?:{_ATOM})*){{0,3}}(?:{_ATOM}(?:[+*]|\{{\d{{1,2}},\}}))?")
"""A branch that reads a bounded number of characters and then takes all of one class. It never backtracks."""
_ENDS_IN_SPACES = r"\s+"
_BRANCHES = {
    r"^▁+$", r" ?[^(\s|[.,!?…。，、।۔،])]+",  # T5, Bloom
    # contractions
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)", "(?i:[sdmt]|ll|ve|re)", "'(?i:[sdmt]|ll|ve|re)",
    # words, each after one other character, and symbols followed by line ends
    r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?+\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]++[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[\p{P}\p{S}]+[\r\n]*",
    # words by case (o200k, tekken)
    *(
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]{upper}[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]{lower}{end}"
        for upper, lower in (("*", "+"), ("+", "*"))
        for end in ("", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?")
    ),
}  # fmt: skip
r"""Branches of published tokenizers that are not `_SIMPLE`. They backtrack over one character at most, or over letters
of both cases (\p{Lm}, \p{Lo}, \p{M}), which the branch takes in the end.
"""
_OVER_SPACES = {r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+(?=\S)", r"\s+$"}
r"""Branches that backtrack over white space, once for each run of it if the expression also has the branch `\s+`."""


class UnboundedError(ArtifactError):
    """A rejected tokenizer; the message says which part has no bound or too high a bound."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"tokenizer.json is refused: {reason}; use another checkpoint, or pass token ids")


@dataclass(frozen=True)
class Bounds:
    """`growth` in bytes per character, and whether all expressions are `regular`, as the module docstring says."""

    growth: int
    regular: bool

    def cost(self, characters: int) -> int:
        """The number of characters that take an ordinary tokenizer as long as `characters` may take this one."""
        return characters * max(1, self.growth // _ORDINARY)

    @property
    def most(self) -> int:
        """Characters of the longest text that may be encoded in this process; -1: none."""
        return MOST_BYTES // self.growth if self.regular else -1

    def fits(self, characters: int) -> bool:
        """Whether a text of `characters` characters may be encoded in this process."""
        return characters <= self.most


def bounds_of(backend: Any) -> Bounds:
    """The bounds of a tokenizers.Tokenizer. Raises UnboundedError for a rejected one.

    Reads only the steps, in well under a millisecond, and Unigram's longest vocabulary piece.
    """
    normalizers, dividers = (
        steps_of(backend.normalizer, "normalizers"),
        steps_of(backend.pre_tokenizer, "pretokenizers"),
    )
    growth = _product(map(_growth, normalizers), _UTF8, "normalizer")
    for step in dividers:
        if step["type"] not in _DIVIDING:
            raise UnboundedError(f"its pre-tokenizer {step['type']!r} is not known")
    for step in steps_of(backend.post_processor, "processors"):
        _require_few_added(step)
    decoders = steps_of(backend.decoder, "decoders")
    _product(map(_widening, decoders), 1, "decoder")
    if (irregular := _irregular(decoders)) is not None:
        raise UnboundedError(f"its decoder has an expression without a bound: {irregular!r:.80}")
    return Bounds(growth, _is_quick(backend) and _irregular([*normalizers, *dividers]) is None)


def steps_of(part: Any, several: str) -> list[Mapping[str, Any]]:
    """The steps of a part of a tokenizers.Tokenizer as in its file, from None, a step, or nested sequences.

    Raises UnboundedError for too many steps.
    """
    found: list[Mapping[str, Any]] = []
    left = [] if part is None else [json.loads(part.__getstate__())]
    while left:
        step = left.pop()
        if step["type"] == "Sequence":
            left += reversed(step[several])
        else:
            found.append(step)
        if len(found) > MOST_STEPS:
            raise UnboundedError(f"it has more than {MOST_STEPS} {several}")
    return found


def is_regular(pattern: str) -> bool:
    """Whether an expression is known to take time in proportion to the text."""
    if len(pattern) > MOST_PATTERN:
        return False
    branches = list(_branches(pattern))
    known = all(b in _BRANCHES or b in _OVER_SPACES or _SIMPLE.fullmatch(b) for b in branches)
    return known and (_ENDS_IN_SPACES in branches or not _OVER_SPACES.intersection(branches))


def _product(factors: Iterable[int], first: int, part: str) -> int:
    """`first` times the factors. Raises UnboundedError naming the part as soon as the product is too large."""
    for factor in factors:
        first *= factor
        if first > MOST_GROWTH:
            raise UnboundedError(f"its {part} makes more than {MOST_GROWTH} bytes of one character")
    return first


def _growth(step: Mapping[str, Any]) -> int:
    """The largest factor by which a normalizer multiplies a text's bytes, rounded up."""
    match step["type"]:
        case "Replace":
            new, old = len(step["content"].encode()), step["pattern"].get("String")
            # an empty text and an expression may match between any two characters
            return max(1, -(-new // len(old.encode()))) if old else 1 + new
        case "Prepend":
            return 1 + len(step["prepend"].encode())
        case "Precompiled":
            return _longest_replacement(step["precompiled_charsmap"])
        case kind if kind in _FORMS:
            return _FORMS[kind]
        case kind:
            raise UnboundedError(f"its normalizer {kind!r} is not known")


def _widening(step: Mapping[str, Any]) -> int:
    """The largest factor by which a decoder multiplies a text's bytes."""
    if step["type"] not in _JOINING:
        raise UnboundedError(f"its decoder {step['type']!r} is not known")
    return _growth(step) if step["type"] == "Replace" else 1


def _irregular(steps: Iterable[Mapping[str, Any]]) -> str | None:
    patterns = (step["pattern"]["Regex"] for step in steps if "Regex" in step.get("pattern", ()))
    return next((pattern for pattern in patterns if not is_regular(pattern)), None)


def _is_quick(backend: Any) -> bool:
    """Whether the model's time is linear in the text. Raises UnboundedError for an unknown model."""
    model = backend.model
    affixes = (getattr(model, name, None) or "" for name in ("continuing_subword_prefix", "end_of_word_suffix"))
    if max(map(len, affixes)) > MOST_AFFIX:
        raise UnboundedError(f"its model adds more than {MOST_AFFIX} characters to each part of a word")
    match type(model).__name__:
        case "WordPiece":
            return bool(model.max_input_chars_per_word <= MOST_WORD)
        case "Unigram":
            return max(map(len, backend.get_vocab(with_added_tokens=False)), default=0) <= MOST_WORD
        case "BPE" | "WordLevel":
            return True
        case kind:
            raise UnboundedError(f"its model {kind!r} is not known")


def _require_few_added(step: Mapping[str, Any]) -> None:
    match step["type"]:
        case "TemplateProcessing":
            ids = {name: len(token["ids"]) for name, token in step["special_tokens"].items()}
            pieces = [*step["single"], *step["pair"]]
            if sum(ids[piece["SpecialToken"]["id"]] for piece in pieces if "SpecialToken" in piece) > MOST_ADDED:
                raise UnboundedError(f"its post-processor adds more than {MOST_ADDED} tokens to a text")
        case "ByteLevel" | "BertProcessing" | "RobertaProcessing":
            pass
        case kind:
            raise UnboundedError(f"its post-processor {kind!r} is not known")


def _longest_replacement(charsmap: str) -> int:
    """Bytes of the longest replacement of a character in SentencePiece's compiled map.

    Format: u32 length of a trie, the trie, then texts that end with a zero byte (sentencepiece, normalizer.cc).
    """
    try:
        data = base64.b64decode(charsmap)
    except (ValueError, binascii.Error) as error:
        raise UnboundedError("its normalizer's map of characters is damaged") from error
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(1, *map(len, texts.split(b"\0")))


def _branches(pattern: str) -> Iterator[str]:
    """The alternatives of an expression outside groups and classes."""
    depth, begin, at, in_class = 0, 0, 0, False
    while at < len(pattern):
        match pattern[at]:
            case "\\":
                at += 1
            case "[" if not in_class:
                in_class = True
            case "]":
                in_class = False
            case "(" if not in_class:
                depth += 1
            case ")" if not in_class:
                depth -= 1
            case "|" if not in_class and not depth:
                yield pattern[begin:at]
                begin = at + 1
        at += 1
    yield pattern[begin:]
