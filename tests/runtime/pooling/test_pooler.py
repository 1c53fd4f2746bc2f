"""A bundle that embeds or scores, open, on the fake device: what texts it takes, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import llmc
from llmc.errors import InputError
from llmc.testing.toy import write_toy_encoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pooler")


def opened(folder: Path, name: str, task: str = "embed", **config: object) -> llmc.LLM:
    model = write_toy_encoder(folder / name, task, **config)
    llmc.compile(model, folder / f"{name}.llmc", device="fake", max_num_seqs=2, cache_dir=folder / "store")
    return llmc.LLM(folder / f"{name}.llmc", threads=2)


@pytest.fixture(scope="module")
def embedding(folder: Path) -> Iterator[llmc.LLM]:
    with opened(folder, "embed") as llm:
        yield llm  # type: ignore[misc]


@pytest.fixture(scope="module")
def scoring(folder: Path) -> Iterator[llmc.LLM]:
    with opened(folder, "score", "score") as llm:
        yield llm  # type: ignore[misc]


def test_many_texts_give_what_each_gives_alone(embedding: llmc.LLM) -> None:
    texts = [chr(97 + at) * length for at, length in enumerate((1, 64, 17, 16, 33, 2, 5))]
    found = embedding.embed(texts)
    for text, one in zip(texts, found, strict=True):
        assert np.allclose(one.outputs.embedding, embedding.embed(text)[0].outputs.embedding, atol=1e-6)
        assert np.linalg.norm(one.outputs.embedding) == pytest.approx(1, abs=1e-5)
    counted = embedding.pooler.statistics
    assert counted.tokens == 2 * sum(map(len, texts))
    assert counted.padded_tokens == sum(batch * tokens * n for (batch, tokens), n in counted.buckets.items())
    assert embedding.embed([]) == []


def test_texts_above_the_longest_bucket_are_refused_by_their_length_unless_they_are_to_be_cut(
    embedding: llmc.LLM,
) -> None:
    with pytest.raises(InputError, match="input 1 has 65 tokens; this model takes at most 64: shorten it"):
        embedding.embed(["a", "x" * 65])
    with pytest.raises(InputError, match="input 0 has 1000 characters, which are at least 143 tokens; this model"):
        embedding.embed("x" * 1000)
    with pytest.raises(InputError, match="input 0 has 65 tokens; this model takes at most 64"):
        embedding.embed([1] * 65)
    for given in ("xy" * 50, [5] * 100):
        cut = embedding.embed(given, truncate_prompt_tokens=-1)[0]
        assert cut.prompt_tokens == 64
        assert np.allclose(cut.outputs.embedding, embedding.embed(given[:64])[0].outputs.embedding, atol=1e-6)
        assert embedding.embed(given, truncate_prompt_tokens=5)[0].prompt_tokens == 5
        assert embedding.embed(given, truncate_prompt_tokens=70)[0].prompt_tokens == 64
    with pytest.raises(InputError, match="truncate_prompt_tokens 0 leaves no text"):
        embedding.embed("a", truncate_prompt_tokens=0)
    assert embedding.embed("x" * 64)[0].prompt_tokens == 64, "one call's cut is not the next one's"


def test_pairs_above_the_longest_bucket_are_refused_too(scoring: llmc.LLM) -> None:
    with pytest.raises(InputError, match="input 1 has 80 tokens; this model takes at most 64"):
        scoring.score("a" * 40, ["b", "b" * 40])
    (cut,) = scoring.score("a" * 40, "b" * 40, truncate_prompt_tokens=-1)
    assert cut.prompt_tokens == 64
    assert cut.outputs.score == pytest.approx(scoring.score("a" * 32, "b" * 32)[0].outputs.score, abs=1e-6)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "input 0 is empty: it has no token"), ([[]], "input 0 is empty"), ([["a"]], "token ids are integers"),
        ([[1, 999]], "input 0: token ids are integers from 0 to 256"), (["a", 5], "not Unicode, or no text"),
        ("\ud800", "not Unicode, or no text"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_refused(embedding: llmc.LLM, given: object, said: str) -> None:
    with pytest.raises(InputError, match=said):
        embedding.embed(given)  # type: ignore[arg-type] # that is the point


def test_a_bundle_without_a_tokenizer_takes_ids_alone_and_checks_them(folder: Path) -> None:
    with opened(folder, "bare", tokenizer=False) as llm:
        assert len(llm.embed([1, 2, 3])[0].outputs.embedding) == 8
        with pytest.raises(InputError, match="no tokenizer in the bundle; pass token ids instead of text"):
            llm.embed("a")
        with pytest.raises(InputError, match="input 1: token ids are integers from 0 to 256"):
            llm.embed([[1], [-1]])
        with pytest.raises(InputError, match="input 0 has 65 tokens"):
            llm.embed([1] * 65)


def test_a_prompt_that_the_model_lacks_is_refused_with_those_that_it_has(
    embedding: llmc.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"the model has no prompt 'query'; it has: none$"):
        embedding.embed("a", prompt_name="query")
    prompts = {"query": "q: ", "document": "d: "}
    monkeypatch.setattr(embedding.pooler, "description", replace(embedding.pooler.description, prompts=prompts))
    with pytest.raises(InputError, match=r"the model has no prompt 'title'; it has: document, query$"):
        embedding.embed("a", prompt_name="title")
