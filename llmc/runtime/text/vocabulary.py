r"""A byte-level BPE vocabulary as arrays, so that a process's first short prompt need not read all of tokenizer.json.

Reading a tokenizer.json of 49,152 tokens takes 80 ms, most of the Python time of a start. BPE of a word uses only
tokens that are substrings of it, and the merges that create these, in order. A tokenizer.json reduced to the substrings
of a text therefore encodes that text to the same ids as the whole file. Substrings are matched to tokens by hash, all
at once.

    index    = "llmc vocabulary 1\n" u32 length, JSON header, padding to 8, arrays; all little endian
    header   = {"skeleton": tokenizer.json without vocabulary and merges, "tokens": N, "merges": M, "ids": I,
                "bytes": B, "lengths": [a token's length in bytes, …]}
    arrays   = hash u64[N] ascending, id u32[N], start u32[I + 1], made u32[M] ascending, rank u32[M], left u32[M],
               right u32[M], text u8[B]

Token i is text[start[i] : start[i + 1]], in UTF-8; `built` is the id of the token that a merge creates from `left` and
`right`. The hash of bytes b is the sum of (b[k] + 1)·BASE^k modulo 2^64 (Karp and Rabin), so the hashes of all
substrings come from one running sum. llmc/compiler/text.py writes it and defines for which tokenizers.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.errors import ArtifactError

VOCABULARY = "tokenizer.index"
"""The bundle file that allows encoding a short text without reading all of tokenizer.json."""

MAGIC = b"llmc vocabulary 1\n"
BASE = 0x9E3779B97F4A7C15
"""Odd, so that it has an inverse modulo 2^64."""
LONGEST_TEXT = 1024
"""Up to this many bytes of text, a cut costs a few milliseconds."""
_INVERSE = pow(BASE, -1, 1 << 64)
_U64 = NDArray[np.uint64]


class Vocabulary:
    """An index over the bytes of a vocabulary file. Raises ArtifactError for invalid bytes."""

    def __init__(self, data: bytes) -> None:
        try:
            if not data.startswith(MAGIC):
                raise ValueError("it is not an index of this version")
            at = len(MAGIC) + 4
            end = at + int.from_bytes(data[at - 4 : at], "little")
            header = json.loads(data[at:end])
            self.skeleton: dict[str, Any] = header["skeleton"]
            self._lengths: list[int] = header["lengths"]
            tokens, merges, ids = header["tokens"], header["merges"], header["ids"]
            at = end + -end % 8
            if len(data) != at + 12 * tokens + 4 * (ids + 1) + 16 * merges + header["bytes"]:
                raise ValueError("its arrays are not as long as it says")
            self._hashes: NDArray[Any] = np.frombuffer(data, "<u8", tokens, at)
            rest = np.frombuffer(data, "<u4", tokens + ids + 1 + 4 * merges, at + 8 * tokens)
            cuts = np.cumsum([tokens, ids + 1, merges, merges, merges])
            self._ids, self._starts, self._built, self._ranks, self._left, self._right = np.split(rest, cuts)
            self._text = data[len(data) - header["bytes"] :]
            lengths_are_sizes = isinstance(self._lengths, list) and all(type(n) is int and n > 0 for n in self._lengths)
            if not isinstance(self.skeleton, dict) or not lengths_are_sizes:
                raise ValueError("its header is not what was written")
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise _damaged(error) from error

    def token(self, index: int) -> str | None:
        """A token by its id, or None."""
        if not 0 <= index < len(self._starts) - 1:
            return None
        return self._text[self._starts[index] : self._starts[index + 1]].decode(errors="replace") or None

    @cached_property
    def _splits(self) -> re.Pattern[str] | None:
        """Where added tokens are cut out of a text: the first match, and the longest of several there."""
        contents = sorted((token["content"] for token in self.skeleton["added_tokens"]), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, contents))) if contents else None

    @cached_property
    def steps(self) -> Any:
        """The tokenizer that normalises and splits texts, without a vocabulary."""
        from tokenizers import Tokenizer

        return Tokenizer.from_str(json.dumps({**self.skeleton, "added_tokens": []}))

    def cut(self, text: str) -> str | None:
        """A tokenizer.json that encodes `text` as the whole one does; None for a text that is too long.

        Raises ArtifactError if the index is damaged.
        """
        try:
            return self._cut(text)
        except Exception as error:  # tokenizers raises nothing narrower
            raise _damaged(error) from error

    def _cut(self, text: str) -> str | None:
        if len(text) > LONGEST_TEXT or len(data := self._symbols(text)) > LONGEST_TEXT:
            return None
        found = {self.token(index): index for index in self._found(data)}
        ids = np.fromiter(found.values(), np.int64, len(found))
        chosen = np.flatnonzero(np.isin(self._built, ids))
        chosen = chosen[np.argsort(self._ranks[chosen], kind="stable")]
        sides = zip(self._left[chosen].tolist(), self._right[chosen].tolist(), strict=True)
        pairs = [(self.token(left), self.token(right)) for left, right in sides]
        vocabulary = found | {token["content"]: token["id"] for token in self.skeleton["added_tokens"]}
        model = {**self.skeleton["model"], "vocab": vocabulary, "merges": pairs}
        return json.dumps({**self.skeleton, "model": model}, ensure_ascii=False)

    def _symbols(self, text: str) -> bytes:
        """The distinct words of a text as the model sees them, in UTF-8, separated by a byte that no token contains."""
        normalizer, divide = self.steps.normalizer, self.steps.pre_tokenizer.pre_tokenize_str
        words: dict[str, None] = {}
        for part in self._splits.split(text) if self._splits else [text]:
            normal = normalizer.normalize_str(part) if normalizer is not None else part
            words |= dict.fromkeys(word for word, _ in divide(normal))
        return "\0".join(words).encode()

    def _found(self, data: bytes) -> list[int]:
        values = np.frombuffer(data, np.uint8).astype(np.uint64) + np.uint64(1)
        powers, inverses = _powers(BASE, len(values)), _powers(_INVERSE, len(values))
        sums = np.concatenate(([np.uint64(0)], np.cumsum(values * powers)))
        found: dict[int, None] = {}
        for length in self._lengths:
            if length > len(values):
                continue
            hashes = (sums[length:] - sums[: len(sums) - length]) * inverses[: len(values) - length + 1]
            offsets = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
            for at in np.flatnonzero(self._hashes[offsets] == hashes).tolist():
                index = int(self._ids[offsets[at]])
                if self._text[self._starts[index] : self._starts[index + 1]] == data[at : at + length]:
                    found[index] = None
        return list(found)


def _damaged(error: Exception) -> ArtifactError:
    return ArtifactError(f"the vocabulary index is damaged ({error}); compile the bundle again")


def _powers(base: int, count: int) -> _U64:
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64)
