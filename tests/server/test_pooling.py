"""/v1/embeddings, /v1/rerank and /v1/score over real sockets."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import llmc
from tests.compiler.encoders_tiny import write_encoder
from tests.server.live import Live


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pooling")


def bundle(folder: Path, task: str) -> Path:
    made = folder / f"{task}.llmc"
    write_encoder(folder / task, "bert", task)
    llmc.compile(
        folder / task, made, device="openvino", dtype="f32", max_num_seqs=2, verify="none", cache_dir=folder / "s"
    )
    return made


@pytest.fixture(scope="module")
def embedding(folder: Path) -> Iterator[Live]:
    with Live(bundle(folder, "embed")) as live:
        yield live.ready()


@pytest.fixture(scope="module")
def scoring(folder: Path) -> Iterator[Live]:
    with Live(bundle(folder, "score")) as live:
        yield live.ready()


def test_embeddings_have_openais_form(embedding: Live) -> None:
    answer = embedding.ask("POST", "/v1/embeddings", {"model": "embed", "input": ["ab", "abcd"]}).json
    assert answer["object"] == "list" and answer["model"] == "embed"
    assert [item["index"] for item in answer["data"]] == [0, 1]
    assert len(answer["data"][0]["embedding"]) == 32
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
    ("body", "param", "told"),
    [
        ({"input": "a", "dimensions": 33}, "dimensions", "must be in 1 … 32"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": []}, "input", "not empty"),
        ({"input": ""}, "input", "is empty"),
        ({"input": [999999]}, "input", "token ids are integers from 0 to"),
        ({"input": "a", "prompt_name": "query"}, None, "has no prompt 'query'"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_field(
    embedding: Live, body: dict[str, object], param: str | None, told: str
) -> None:
    answer = embedding.ask("POST", "/v1/embeddings", body)
    assert answer.status == 400
    assert told in answer.json["error"]["message"]
    assert answer.json["error"]["param"] == param


def test_other_tasks_are_refused_and_rows_are_counted(embedding: Live) -> None:
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


def test_queries_that_do_not_pair_are_refused(scoring: Live) -> None:
    answer = scoring.ask("POST", "/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]})
    assert (answer.status, answer.json["error"]["param"]) == (400, "text_1")
    assert "2 queries for 3 documents" in answer.json["error"]["message"]
