"""A provable upper bound on the text that one token can cover, to reject too long texts without tokenizing them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llmc.runtime.text.bounds import steps_of

NFC_SHRINKS = 9
"""NFC shrinks a text to no less than a ninth of its bytes: a character decomposes to at least a third of its bytes, and
composition shrinks at most threefold.
"""
_KEEPING = {"ByteLevel", "Split", "Digits", "Metaspace", "Punctuation"}


@dataclass(frozen=True)
class TokenWidth:
    """One token covers at most `widest` bytes of text. The bytes in `lost` belong to no token and are dropped."""

    widest: int
    lost: bytes = b""

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens of `text`. A megabyte blocks the interpreter for some milliseconds."""
        kept = text.encode("utf-8", "surrogatepass").translate(None, self.lost)
        return -(-len(kept) // self.widest)


def token_width(backend: Any) -> TokenWidth | None:
    """The bound of a tokenizer; None if a token may cover any length, or if unknown.

    Supported are BPE models over bytes, or with a full byte fallback, if no step drops text.
    """
    model = backend.model
    if type(model).__name__ != "BPE" or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    shrinks = _shrinks(steps_of(backend.normalizer, "normalizers"))
    steps = steps_of(backend.pre_tokenizer, "pretokenizers")
    if shrinks is None or not all(_keeps(step) for step in steps):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    by_bytes = any(step["type"] == "ByteLevel" for step in steps)
    spellings = byte_alphabet() if by_bytes else {f"<0x{byte:02X}>": byte for byte in range(256)}
    lost = bytes(byte for name, byte in spellings.items() if name not in vocabulary)
    if not (by_bytes or model.byte_fallback) or (lost and not (by_bytes and model.unk_token is None and shrinks == 1)):
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # such a token takes all adjacent white space
        return None
    widest = max(map(len, vocabulary)) if by_bytes else max(len(name.encode()) for name in vocabulary)
    return TokenWidth(max([widest, *(len(token.content.encode()) for token in added)]) * shrinks, lost)


def byte_alphabet() -> dict[str, int]:
    """The character for each byte in GPT-2's byte-level vocabularies.

    Printable bytes are themselves; the others are numbered from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _keeps(step: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer keeps every character of the text."""
    return step["type"] in _KEEPING and step.get("behavior") != "Removed"


def _shrinks(steps: Iterable[Mapping[str, Any]]) -> int | None:
    """The largest factor by which a normalizer may shorten a text; None: unknown."""
    factor = 1
    for step in steps:
        if step["type"] == "NFC":
            factor *= NFC_SHRINKS
        elif step["type"] == "Replace":
            old, new = step["pattern"].get("String"), step["content"]
            if not old or len(new.encode()) < len(old.encode()):
                return None
        elif step["type"] != "Prepend":
            return None
    return factor
