"""A text is encoded by a cut of the vocabulary as by all of it, or all of it is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer

from llmc.artifacts.bundle.reader import blob_path
from llmc.compiler import text as text_files
from llmc.compiler.text import build_index
from llmc.errors import ArtifactError, InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.llm import BundleLLM
from llmc.runtime.prompts import Prompts
from llmc.runtime.text.tokenizer import StreamDetokenizer, Tokenizer
from llmc.runtime.text.vocabulary import LONGEST_TEXT, VOCABULARY, Vocabulary
from tests.artifacts.helpers import flip
from tests.tiers import examples
from tests.toy import Toy

CORPUS = ["the theatre there, then: 1234 the\n\n  they're “thé” in Thessaloniki Θεσσαλονίκη 日本語日本 😀😀 "] * 20
KINDS = {
    "regex": {},
    "one word": {"use_regex": False},
    "prefix space": {"add_prefix_space": True},
    "digits": {"before": [pre_tokenizers.Digits(individual_digits=True)]},
    "split": {"use_regex": False, "before": [pre_tokenizers.Split(" ", "merged_with_next")]},
    "normalised": {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])},
    "whole words": {"ignore_merges": True},
    "unknown": {"unk_token": "<unk>", "alphabet": []},
    "added only": {"added": []},
}


@cache
def whole(kind: str) -> bytes:
    """A trained tokenizer.json: byte-level BPE, with special tokens inside its vocabulary and tokens beyond it."""
    how: dict[str, Any] = dict(KINDS[kind])
    backend = Backend(BPE(ignore_merges=how.get("ignore_merges", False), unk_token=how.get("unk_token")))
    if "normalizer" in how:
        backend.normalizer = how["normalizer"]
    level = pre_tokenizers.ByteLevel(how.get("add_prefix_space", False), use_regex=how.get("use_regex", True))
    backend.pre_tokenizer = pre_tokenizers.Sequence([*how.get("before", []), level])
    backend.decoder = decoders.ByteLevel()
    special = ["<unk>", "<s>", "<|end|>"]
    alphabet = how.get("alphabet", pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        CORPUS, BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_tokens([AddedToken(t, normalized=False) for t in how.get("added", ["<|end|>>", "there", "  \n", "é"])])
    backend.add_special_tokens(["<tool>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend.to_str().encode()


@cache
def both(kind: str) -> tuple[Tokenizer, Vocabulary]:
    index = build_index(whole(kind), smallest=0)
    assert index is not None
    return Tokenizer(whole(kind)), Vocabulary(index)


PIECES = [
    "the",
    " the",
    "there",
    "<|end|>",
    "<|end|>>",
    "<s>",
    "  \n",
    " ",
    "\n",
    "12",
    "they're",
    "日本語",
    "😀",
    "é",
    "\0",
]
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=20).map("".join)


@examples(60)
@given(st.sampled_from(sorted(KINDS)), TEXTS, st.booleans())
def test_a_cut_encodes_its_text_as_the_whole_does(kind: str, text: str, special: bool) -> None:
    tokenizer, vocabulary = both(kind)
    cut = vocabulary.cut(text)
    assert cut is not None
    assert Tokenizer(cut.encode()).encode(text, special) == tokenizer.encode(text, special)


def test_a_cut_is_small() -> None:
    _, vocabulary = both("regex")
    cut = vocabulary.cut("then the theatre")
    assert cut is not None
    assert len(json.loads(cut)["model"]["vocab"]) < 60 < len(json.loads(whole("regex"))["model"]["vocab"])


@pytest.mark.parametrize("text", ["x" * (LONGEST_TEXT + 1), "ü" * LONGEST_TEXT], ids=["characters", "bytes"])
def test_a_long_text_has_no_cut(text: str) -> None:
    assert both("regex")[1].cut(text) is None


# A tokenizer over a vocabulary


class Reader:
    """Counts how often all of a tokenizer.json is asked for."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.reads = 0

    def __call__(self) -> bytes:
        self.reads += 1
        return whole(self.kind)


def quick(kind: str = "regex") -> tuple[Tokenizer, Reader]:
    reader = Reader(kind)
    return Tokenizer(reader, [2], both(kind)[1]), reader


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_answer_needs_no_more_than_cuts(kind: str) -> None:
    expected = both(kind)[0]
    tokenizer, reader = quick(kind)
    ids = tokenizer.encode("then <|end|> the 日本 théâtre")
    assert ids == expected.encode("then <|end|> the 日本 théâtre")
    assert (tokenizer.is_byte_level, tokenizer.special_ids) == (True, expected.special_ids)
    streams = [StreamDetokenizer(one) for one in (tokenizer, expected)]
    reported = ["".join([*(s.feed(i) for i in [*ids, 5, 0, 599, 10**6]), s.flush()]) for s in streams]
    assert reported[0] == reported[1]
    assert [tokenizer.id_to_token(i) for i in range(700)] == [expected.id_to_token(i) for i in range(700)]
    assert reader.reads == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t.load(),
        lambda t: t.decode([5, 6]),
        lambda t: t.vocab_size,
        lambda t: t.token_to_id("the"),
        lambda t: t.encode("x" * 2000),
        lambda t: [t.encode("the") for _ in range(20)],
    ],
    ids=["load", "decode", "size", "id of a token", "a long text", "many texts"],
)
def test_what_needs_all_of_it_reads_it_once(use: Callable[[Tokenizer], Any]) -> None:
    tokenizer, reader = quick()
    assert use(tokenizer) == use(both("regex")[0])
    use(tokenizer)
    tokenizer.encode("the")
    assert reader.reads == 1


def test_bad_input_is_refused_as_ever() -> None:
    tokenizer, _ = quick()
    with pytest.raises(InputError, match="lone surrogate"):
        tokenizer.encode("\ud800")
    with pytest.raises(InputError, match="integers from 0"):
        tokenizer.id_to_token(-1)


def test_what_is_no_index_is_an_artifact_error() -> None:
    index = build_index(whole("regex"), smallest=0)
    assert index is not None
    for bad in (b"", b"{}", index[:100], index[:-3], index.replace(b"vocabulary 1", b"vocabulary 2")):
        with pytest.raises(ArtifactError, match=r"vocabulary index is damaged .*; compile the bundle again"):
            Vocabulary(bad)


# Writing one


def changed(**changes: Any) -> bytes:
    """The tokenizer.json with members replaced: model__NAME is of its model, added__NAME of its last added token."""
    document = json.loads(whole("regex"))
    for name, value in changes.items():
        owner, _, member = name.rpartition("__")
        {"": document, "model": document["model"], "added": document["added_tokens"][-1]}[owner][member] = value
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "changes",
    [
        {"model__dropout": 0.1},
        {"model__continuing_subword_prefix": "##"},
        {"model__end_of_word_suffix": "</w>"},
        {"model__byte_fallback": True},
        {"model__vocab": {"a\0": 0, "b": 1}},
        {"model__merges": [["no such", "token"]]},
        {"model__type": "Unigram"},
        {"decoder": None},
        {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
        {"pre_tokenizer": None},
        {"added__lstrip": True},
        {"added__rstrip": True},
        {"added__single_word": True},
        {"added__normalized": True, "normalizer": {"type": "NFC"}},
        {"added_tokens": 3},
        {"model": []},
    ],
    ids=str,
)
def test_none_is_written_where_it_could_not_be_right(changes: dict[str, Any]) -> None:
    assert build_index(changed(), smallest=0) is not None
    assert build_index(changed(**changes), smallest=0) is None


def test_none_is_written_for_what_is_read_as_fast_or_is_no_bpe() -> None:
    assert build_index(whole("regex")) is None
    words = Backend(WordLevel({"a": 0}, unk_token="a")).to_str().encode()
    assert build_index(words, smallest=0) is None
    assert build_index(b"no JSON", smallest=0) is None


def test_the_same_tokenizer_gives_the_same_bytes() -> None:
    assert build_index(whole("digits"), smallest=0) == build_index(whole("digits"), smallest=0)


# In a bundle


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(text_files, "build_index", partial(build_index, smallest=0))
    toy = Toy.make(tmp_path)
    toy.compile()
    return toy.bundle


def test_a_bundle_brings_it_and_answers_without_the_rest(bundle: Path) -> None:
    digest = Bundle.open(bundle).manifest.files["tokenizer.json"]
    greedy = SamplingParams(max_tokens=6, temperature=0)
    with BundleLLM(bundle) as llm:
        (expected,) = llm.generate("a river", greedy)
        assert expected.outputs[0].text == llm.get_tokenizer().decode(expected.outputs[0].token_ids)
    flip(blob_path(bundle, digest))
    with BundleLLM(bundle) as llm:
        assert llm.generate("a river", greedy)[0].outputs == expected.outputs
        with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
            llm.get_tokenizer().decode([1])


def test_preparing_for_prompts_leaves_the_first_text_little_to_do(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    Prompts(opened).prepare()
    vocabulary = opened.tokenizer._vocabulary
    assert vocabulary is not None and {"steps", "_splits"} <= vars(vocabulary).keys()


def test_a_damaged_index_is_named(bundle: Path) -> None:
    flip(blob_path(bundle, Bundle.open(bundle).manifest.files[VOCABULARY]))
    with pytest.raises(ArtifactError, match=r"tokenizer\.index.* was altered"):
        BundleLLM(bundle)
