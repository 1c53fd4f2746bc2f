"""/v1/embeddings, /v1/rerank and /v1/score over real sockets."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import llmc
from llmc.server.events import Ready
from llmc.testing.toy import write_toy_encoder
from tests.server.live import Live


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pooling")


def bundle(folder: Path, task: str) -> Path:
    built = folder / f"{task}.llmc"
    llmc.compile(write_toy_encoder(folder / task, task), built, device="fake", max_num_seqs=2, cache_dir=folder / "s")
    return built


@pytest.fixture(scope="module")
def embedding(folder: Path) -> Iterator[Live]:
    with Live(bundle(folder, "embed")) as live:
        yield live.ready()


@pytest.fixture(scope="module")
def scoring(folder: Path) -> Iterator[Live]:
    with Live(bundle(folder, "score")) as live:
        yield live.ready()


def test_every_bucket_has_run_before_the_server_is_ready(embedding: Live) -> None:
    (ready,) = (event for event in embedding.events if isinstance(event, Ready))
    assert (ready.warmed, ready.compilations) == (6, 0), "1 and 2 texts of 16, 32 and 64 tokens"


def test_embeddings_have_openais_form(embedding: Live) -> None:
    answer = embedding.ask("POST", "/v1/embeddings", {"model": "embed", "input": ["ab", "abcd"]}).json
    assert answer["object"] == "list" and answer["model"] == "embed"
    assert [item["index"] for item in answer["data"]] == [0, 1]
    assert len(answer["data"][0]["embedding"]) == 8
    assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert np.linalg.norm(answer["data"][1]["embedding"]) == pytest.approx(1, abs=1e-5)


def test_base64_holds_the_same_numbers_and_ids_stand_for_texts(embedding: Live) -> None:
    def ask(**body: object) -> object:
        return embedding.ask("POST", "/v1/embeddings", body).json["data"][0]["embedding"]

    plain = np.array(ask(input="ab", dimensions=4))
    packed = np.frombuffer(base64.b64decode(str(ask(input="ab", dimensions=4, encoding_format="base64"))), "<f4")
    assert np.allclose(plain, packed, atol=1e-6)
    from llmc.runtime.text.tokenizer import Tokenizer
    from llmc.testing.toy import tokenizer_json

    ids = Tokenizer(tokenizer_json().encode()).encode("ab")
    assert np.allclose(np.array(ask(input=ids)), np.array(ask(input="ab")), atol=1e-6)


@pytest.mark.parametrize(
    ("body", "param", "reported"),
    [
        ({"input": "a", "dimensions": 9}, "dimensions", "must be in 1 … 8"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": []}, "input", "not empty"),
        ({"input": ""}, "input", "is empty"),
        ({"input": ["a", "x" * 65]}, "input", "input 1 has 65 tokens; this model takes at most 64"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "0 leaves no text"),
        ({"input": ["a"] * 1025}, "input", "at most 1024"),
        ({"input": [[1], "a"]}, "input", ""),
        ({"input": {"a": 1}}, "input", ""),
        ({"input": "a", "dimensions": 1 << 70}, "dimensions", ""),
        ({"input": [999999]}, "input", "token ids are integers from 0 to"),
        ({"input": "a", "prompt_name": "query"}, None, "has no prompt 'query'"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_field(
    embedding: Live, body: dict[str, object], param: str | None, reported: str
) -> None:
    answer = embedding.ask("POST", "/v1/embeddings", body)
    assert answer.status == 400
    assert reported in answer.json["error"]["message"]
    assert answer.json["error"]["param"] == param


def test_other_tasks_are_refused_and_rows_are_counted(embedding: Live) -> None:
    assert embedding.ask("POST", "/v1/embeddings", {"input": "ab"}).status == 200
    for path, body in (
        ("/v1/rerank", {"query": "a", "documents": ["b"]}), ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/completions", {"prompt": "a"}),
    ):  # fmt: skip
        answer = embedding.ask("POST", path, body)
        assert (answer.status, answer.json["error"]["code"]) == (400, "unsupported_endpoint"), path
    lines = embedding.get("/metrics").text.splitlines()
    (rows,) = [line for line in lines if line.startswith("llmc:pooling_rows_total")]
    assert float(rows.split()[-1]) > 0
    assert embedding.get("/health").status == 200
    assert embedding.get("/v1/models").json["data"][0]["max_model_len"] == 64


def test_documents_are_ranked_by_their_scores(scoring: Live) -> None:
    documents = ["first", "the second one", "3"]
    scored = scoring.ask("POST", "/v1/score", {"text_1": "query", "text_2": documents}).json
    values = [item["score"] for item in scored["data"]]
    ranked = scoring.ask("POST", "/v1/rerank", {"query": "query", "documents": documents, "top_n": 2}).json
    best = sorted(range(3), key=lambda at: -values[at])[:2]
    assert [item["index"] for item in ranked["results"]] == best
    for item in ranked["results"]:
        assert item["document"] == {"text": documents[item["index"]]}
        assert item["relevance_score"] == pytest.approx(values[item["index"]], abs=1e-5)
    assert scored["usage"]["total_tokens"] == 3 * 5 + sum(map(len, documents))


@pytest.mark.parametrize(
    ("path", "body", "param", "reported"),
    [
        ("rerank", {"query": "a", "documents": []}, "documents", "at least 1 item"),
        ("rerank", {"query": "a", "documents": ["b"] * 1025}, "documents", "at most 1024"),
        ("rerank", {"query": "a", "documents": [{"text": "b"}]}, "documents", ""),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", ""),
        ("rerank", {"query": ["a"], "documents": ["b"]}, "query", ""),
        ("rerank", {"documents": ["b"]}, "query", ""),
        ("rerank", {"query": "a" * 40, "documents": ["b", "b" * 40]}, None, "input 1 has 80 tokens"),
        ("score", {"text_1": "a", "text_2": []}, "text_2", ""),
        ("score", {"text_1": "a", "text_2": 5}, "text_2", ""),
        ("score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ""),
        ("score", {"text_1": "", "text_2": ""}, None, "input 0 is empty"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_field(
    scoring: Live, path: str, body: dict[str, object], param: str | None, reported: str
) -> None:
    answer = scoring.ask("POST", f"/v1/{path}", body)
    assert answer.status == 400, answer.text
    assert reported in answer.json["error"]["message"]
    assert param is None or str(answer.json["error"]["param"]).startswith(param)


def test_texts_that_are_too_long_are_cut_where_that_is_requested(scoring: Live) -> None:
    body = {"text_1": "a" * 40, "text_2": "b" * 40, "truncate_prompt_tokens": -1}
    assert scoring.ask("POST", "/v1/score", body).json["usage"]["total_tokens"] == 64


def test_queries_that_do_not_pair_are_refused(scoring: Live) -> None:
    answer = scoring.ask("POST", "/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]})
    assert (answer.status, answer.json["error"]["param"]) == (400, "text_1")
    assert "2 queries for 3 documents" in answer.json["error"]["message"]
