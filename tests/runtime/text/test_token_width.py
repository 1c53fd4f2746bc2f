"""What one token may stand for: told where it can be proved, and never too little."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel

from llmc.runtime.text.token_width import NFC_SHRINKS, TokenWidth, token_width
from tests.tiers import examples
from tests.timing import least_cpu_seconds

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(**changes) -> Tokenizer:
    names = [*BYTES, "Ġa", "ab", "abab"]
    built = Tokenizer(BPE({name: i for i, name in enumerate(names)}, [("a", "b"), ("ab", "ab"), ("Ġ", "a")]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    for name, value in changes.items():
        setattr(built, name, value)
    return built


def sentence_piece(**model) -> Tokenizer:
    names = ["<unk>", "▁", "a", "▁a", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {name: i for i, name in enumerate(names)}
    options = {"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True, **model}
    built = Tokenizer(BPE(vocabulary, [("▁", "a")], **options))
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return built


def digits_first() -> Tokenizer:
    split = pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated")
    return byte_level(pre_tokenizer=pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False)]))


KNOWN = {"bytes": (byte_level, 4), "pieces": (sentence_piece, 6), "digits": (digits_first, 4),
         "nfc": (lambda: byte_level(normalizer=normalizers.NFC()), 4 * NFC_SHRINKS)}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_it_is_the_longest_tokens_length(name):
    make, width = KNOWN[name]
    assert token_width(make()) == TokenWidth(width)


@pytest.mark.parametrize("name", KNOWN)
@examples(60, derandomize=True)
@given(st.text(st.sampled_from("ab 1é日\u0301\u212a😀"), max_size=60))
def test_no_text_has_fewer_tokens_than_it_says(name, text):
    built = KNOWN[name][0]()
    least = token_width(built).least_tokens(text)
    assert least <= len(built.encode(text, add_special_tokens=False).ids)
    assert least >= len(text.encode()) / KNOWN[name][1]


def unspelt(**options) -> Tokenizer:
    """A vocabulary without "!", as some lack bytes that they were never trained on."""
    built = Tokenizer(BPE({name: i for i, name in enumerate([*BYTES[1:], "ab"])}, [("a", "b")], **options))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return built


@examples(60, derandomize=True)
@given(st.text(st.sampled_from("ab!"), max_size=60))
def test_bytes_that_no_token_has_count_for_nothing(text):
    assert BYTES[0] == "!"
    built = unspelt()
    assert token_width(built) == TokenWidth(2, b"!")
    assert token_width(built).least_tokens(text) <= len(built.encode(text).ids)


def test_bytes_of_no_token_are_counted_in_one_pass_however_many_there_are():
    text = "lorem ipsum " * 80_000

    few, many = (TokenWidth(9, bytes(range(0x80, end))) for end in (0x82, 0xFF))
    once = least_cpu_seconds(lambda: few.least_tokens(text))
    assert least_cpu_seconds(lambda: many.least_tokens(text)) < 6 * once


def test_an_added_token_counts_with_its_own_length():
    built = byte_level()
    built.add_special_tokens(["<|a long end|>"])
    assert token_width(built) == TokenWidth(14)


def stripping() -> Tokenizer:
    built = byte_level()
    built.add_tokens([AddedToken("<mask>", lstrip=True)])
    return built


UNKNOWN = {
    "words": lambda: Tokenizer(WordLevel({"a": 0}, unk_token="a")),
    "a normalizer that drops": lambda: byte_level(normalizer=normalizers.Strip()),
    "a replacement that shortens": lambda: byte_level(normalizer=normalizers.Replace("aa", "a")),
    "a pattern": lambda: byte_level(normalizer=normalizers.Replace(Regex("a+"), "aaaa")),
    "a split that drops": lambda: byte_level(pre_tokenizer=pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(False)])),
    "white space dropped": lambda: byte_level(pre_tokenizer=pre_tokenizers.Whitespace()),
    "bytes that all are one token": lambda: unspelt(unk_token="a", fuse_unk=True),
    "white space beside a token": stripping,
    "no fall back to bytes": lambda: sentence_piece(byte_fallback=False),
}  # fmt: skip


@pytest.mark.parametrize("why", UNKNOWN)
def test_it_is_not_reported_where_a_token_may_cover_any_length(why):
    assert token_width(UNKNOWN[why]()) is None


def test_nfc_leaves_at_least_a_ninth():
    """No character decomposes to less than a third of its bytes; none in NFC stands for more than thrice its own."""
    for code in [*range(0xD800), *range(0xE000, 0x30000)]:
        character = chr(code)
        apart = len(unicodedata.normalize("NFD", character).encode())
        assert 3 * apart >= len(character.encode()), hex(code)
        assert apart <= 3 * len(character.encode()) or unicodedata.normalize("NFC", character) != character, hex(code)
    assert NFC_SHRINKS == 9
