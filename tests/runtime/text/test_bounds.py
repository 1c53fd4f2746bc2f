"""A tokenizer's steps are a stranger's: what they may cost is bounded, or done where it harms nobody, or refused."""

from __future__ import annotations

import base64
import importlib
import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from llmc.compiler.text import build_index
from llmc.errors import ArtifactError, InputError
from llmc.runtime.confined.limits import ChildLimits
from llmc.runtime.pooling.modules import PoolingDescription
from llmc.runtime.pooling.tokens import WHOLE, PoolingTokenizer
from llmc.runtime.text import encoding_pool
from llmc.runtime.text.bounds import MOST_BYTES, MOST_GROWTH, UnboundedError, bounds_of, is_regular
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.runtime.text.vocabulary import Vocabulary
from llmc.testing import toy
from llmc.testing.toy import BYTES
from tests.tiers import full

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CONTRACTED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
REST = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PUBLISHED = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    CL100K,
    CL100K.replace(r"\p{N}{1,3}", r"\p{N}"),
    f"{CASED}*{SMALL}+{CONTRACTED}|{CASED}+{SMALL}*{CONTRACTED}|{REST}",
    f"{CASED}*{SMALL}+|{CASED}+{SMALL}*|{REST}",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    r"\s?\p{L}+", r"\s?\p{P}+", "[\r\n]", r"[一-龥぀-ゟ゠-ヿ]+", " {2,}", r"\p{N}{1,3}", r"\s+", "[0-9][0-9][0-9]",
    r"^▁+$", r" ?[^(\s|[.,!?…。，、।۔،])]+",
]  # fmt: skip
"""Expressions of GPT-2, GPT-4 and Llama 3, Qwen, GPT-4o, Mistral, StableLM, DeepSeek, Falcon, T5, Bloom."""
BACKTRACKING = [
    "(a+)+$", "(a|aa)+$", "(?:a*)*b", r"(.*)\1", "a*a*b", r"\s*x", r"\s*[\r\n]+", r"\s+(?!\S)", r"(?<=a+)b",
    r"(?=(a+))b", "a{1000,}", "|".join(["ab"] * 800), "a{0,9}a{0,9}a{0,9}a{0,9}a{0,9}b",
]  # fmt: skip


def with_steps(**steps: Any) -> bytes:
    """The toy's tokenizer.json with other steps."""
    return json.dumps({**json.loads(toy.tokenizer_json()), **steps}).encode()


def replaced(*pairs: tuple[str, str]) -> dict[str, Any]:
    steps = [{"type": "Replace", "pattern": {"String": old}, "content": new} for old, new in pairs]
    return {"type": "Sequence", "normalizers": steps}


def split(pattern: str) -> dict[str, Any]:
    whole = json.loads(toy.tokenizer_json())["pre_tokenizer"]
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [step, whole]}


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_published_expressions_take_time_in_proportion_to_the_text(pattern: str) -> None:
    assert is_regular(pattern)
    tokenizer = Tokenizer(with_steps(pre_tokenizer=split(pattern)))
    assert tokenizer.bounds.regular
    for text in (" " * 40_000, "aA" * 20_000, "a" * 40_000 + "!", "\n " * 20_000, "1" * 40_000, "é" * 20_000 + "\r"):
        began = time.thread_time()
        tokenizer.encode(text[:1000])
        short = time.thread_time() - began
        began = time.thread_time()
        tokenizer.encode(text)
        assert time.thread_time() - began < 40 * 20 * short + 1, text[:3]


@pytest.mark.parametrize("pattern", BACKTRACKING)
def test_what_goes_back_over_a_text_is_not_taken_for_that(pattern: str) -> None:
    assert not is_regular(pattern)


def test_growth_is_the_product_over_the_steps() -> None:
    data = with_steps(normalizer=replaced(("@", "@@"), ("@", "1234"), ("ab", "123")))
    assert Tokenizer(data).bounds.growth == 4 * 2 * 4 * 2
    assert Tokenizer(toy.tokenizer_json().encode()).bounds.growth == 4


DOUBLING = replaced(*[("@", "@@")] * 9)


def test_a_text_that_may_grow_large_is_encoded_in_a_child_and_gets_the_same_ids() -> None:
    """One sign becomes 512: 4 MiB are reached with 2,048 signs."""
    data = with_steps(normalizer={"type": "Sequence", "normalizers": [DOUBLING["normalizers"][0]] * 8})
    tokenizer = Tokenizer(data)
    fits = MOST_BYTES // tokenizer.bounds.growth
    assert fits == 4096 and tokenizer.bounds.growth == MOST_GROWTH
    text = "@" + "a" * fits
    assert tokenizer.encode(text[:fits]) == tokenizer.encode_here(text[:fits], None)[0]
    assert tokenizer._confined is None
    assert tokenizer.encode_last(text, 300) == tokenizer.encode_here(text, 300)
    assert tokenizer._confined is not None
    with pytest.raises(InputError, match="lone surrogate at character 0: not Unicode"):
        tokenizer.encode("\ud800" * (fits + 1))


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ({"normalizer": DOUBLING}, f"its normalizer makes more than {MOST_GROWTH} bytes of one character"),
        ({"normalizer": replaced(("@", "x" * 500))}, f"more than {MOST_GROWTH} bytes"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 500}}, f"more than {MOST_GROWTH} bytes"),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "y" * 300}}, "more than"),
        ({"decoder": {"type": "Replace", "pattern": {"String": "@"}, "content": "x" * 2000}}, "its decoder makes"),
        ({"decoder": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}}, "its decoder has an"),
        (
            {"post_processor": {
                "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "e", "type_id": 0}}] * 300,
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {"e": {"id": "e", "ids": [256], "tokens": ["e"]}},
            }},
            "its post-processor adds more than 256 tokens",
        ),
        ({"normalizer": replaced(*[("ab", "ba")] * 65)}, "it has more than 64 normalizers"),
        (
            {"model": {
                "type": "BPE", "vocab": {"a": 0}, "merges": [], "continuing_subword_prefix": "#" * 65,
            }, "added_tokens": []},
            "its model adds more than 64 characters to each part of a word",
        ),
    ],
)  # fmt: skip
def test_what_has_no_bound_is_refused(steps: dict[str, Any], reason: str) -> None:
    with pytest.raises(ArtifactError, match=f"^tokenizer.json is refused: .*{reason}.*; use another checkpoint"):
        Tokenizer(with_steps(**steps))


def test_an_expression_that_goes_back_runs_in_a_child_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_pool, "LIMITS", ChildLimits(seconds=0.5, memory_bytes=256 << 20))
    tokenizer = Tokenizer(with_steps(pre_tokenizer=split("a*[^a]c")))
    assert not tokenizer.bounds.regular and not tokenizer.bounds.fits(0)
    assert tokenizer.encode("hi") == tokenizer.encode_here("hi", None)[0]
    with pytest.raises(InputError, match=r"the text cannot be tokenised: it takes more than 0\.5 s"):
        tokenizer.encode("a" * 200_000 + "ddc")
    assert tokenizer.encode("hi") == tokenizer.encode_here("hi", None)[0], "and the next one is answered"


def test_an_index_does_not_vouch_for_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that the index does not serve is judged by the file."""
    index = build_index(toy.tokenizer_json().encode(), smallest=0)
    assert index is not None
    hostile = with_steps(pre_tokenizer=split("a*[^a]c"))
    tokenizer = Tokenizer(lambda: hostile, (), Vocabulary(index))
    assert tokenizer.bounds.regular
    assert tokenizer.encode("a" * 2000) == tokenizer.encode_here("a" * 2000, None)[0]
    assert not tokenizer.bounds.regular and tokenizer._confined is not None


def test_an_expression_of_a_decoder_is_judged_whatever_the_others_are() -> None:
    decoder = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}
    with pytest.raises(ArtifactError, match="its decoder has an expression without a bound"):
        Tokenizer(with_steps(pre_tokenizer=split("(a+)+b"), decoder=decoder))


def test_native_code_that_panics_over_an_expression_is_an_error_of_that_text(capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer(with_steps(pre_tokenizer=split("(a+)+b")))
    with pytest.raises(InputError, match=r"cannot be tokenised: the model's tokenizer fails on it \(.*retry-limit"):
        tokenizer.encode("a" * 40 + "c")
    assert tokenizer.encode("hi") == tokenizer.encode_here("hi", None)[0]
    assert capfd.readouterr().err == ""


def charsmap(*texts: str) -> str:
    """A map with an empty trie, which puts no character's text anywhere."""
    trie = struct.pack("<I", 0)
    return base64.b64encode(struct.pack("<I", len(trie)) + trie + b"".join(t.encode() + b"\0" for t in texts)).decode()


def test_a_compiled_map_of_characters_grows_by_its_longest_text() -> None:
    known = {"type": "Precompiled", "precompiled_charsmap": charsmap("a", "x" * 33)}
    assert bounds_of(Backend.from_str(with_steps(normalizer=known).decode())).growth == 4 * 33
    known["precompiled_charsmap"] = charsmap("x" * 1000)
    with pytest.raises(UnboundedError, match="its normalizer makes more than"):
        bounds_of(Backend.from_str(with_steps(normalizer=known).decode()))


def test_words_that_wordpiece_looks_at_in_every_part_are_short() -> None:
    model = {"type": "WordPiece", "unk_token": "u", "continuing_subword_prefix": "##", "vocab": {"u": 0, "a": 1}}
    for most, regular in ((100, True), (100_000, False)):
        data = with_steps(model={**model, "max_input_chars_per_word": most}, added_tokens=[])
        assert Tokenizer(data).bounds.regular is regular


EMBEDS = PoolingDescription("embed", 64)


def test_a_tokenizer_of_a_model_that_embeds_is_bounded_too() -> None:
    tokens = PoolingTokenizer(with_steps(normalizer={**DOUBLING, "normalizers": DOUBLING["normalizers"][:8]}), EMBEDS)
    assert tokens.encode(["hi"])[0].ids == [BYTES.index("h"), BYTES.index("i")]
    with pytest.raises(InputError, match="input 1 has 4097 characters; this tokenizer takes at most 4096 at once"):
        tokens.encode(["hi", "a" * 4097], cut=WHOLE)
    with pytest.raises(ArtifactError, match="its normalizer makes more than"):
        PoolingTokenizer(with_steps(normalizer=DOUBLING), EMBEDS)
    with pytest.raises(ArtifactError, match="the time of its steps for a text has no known bound"):
        PoolingTokenizer(with_steps(pre_tokenizer=split("(a+)+b")), EMBEDS)


REFUSED = {"SeamlessM4TTokenizer"}
"""Speech; its map of characters is longer than any other."""


@full
def test_tokenizers_of_transformers_are_bounded_and_stay_in_the_process() -> None:
    """Each class that builds its steps without a file."""
    import transformers

    found = {}
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/tokenization_*.py")):
        if "TokenizersBackend" not in file.read_text():
            continue
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        for name in getattr(module, "__all__", ()):
            try:
                backend = getattr(module, name)()._tokenizer
            except Exception:  # noqa: BLE001 - most need a vocabulary
                continue
            found[name] = backend
    assert len(found) >= 45
    for name, backend in found.items():
        if name not in REFUSED:
            bounds = bounds_of(backend)
            assert bounds.regular and bounds.growth <= 256, name
