"""The OpenAPI document: it is complete, and the server keeps to it, whatever it is asked."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from llmc.server.app import BODIES
from tests.server.live import Live
from tests.tiers import default_cases

KEY = "k"


@pytest.fixture(scope="module")
def live(toy, tmp_path_factory):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LLMC_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        with Live(toy.path, api_keys=(KEY,)) as live:
            yield live.ready()


@pytest.fixture(scope="module")
def document(live):
    return live.ask("GET", "/openapi.json", Authorization=f"Bearer {KEY}").json


def test_the_document_names_every_body_answer_and_error(document):
    schemas = document["components"]["schemas"]
    assert {body.__name__ for body in BODIES} | {"ErrorResponse", "CompletionResponse", "ChatResponse"} <= set(schemas)
    error = {"$ref": "#/components/schemas/ErrorResponse"}
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        operation = document["paths"][path]["post"]
        assert "$ref" in operation["requestBody"]["content"]["application/json"]["schema"]
        answers = operation["responses"]
        assert {"200", "400", "401", "404", "413", "415", "500", "503"} <= set(answers)
        for status, answer in answers.items():
            if int(status) >= 400:
                assert answer["content"]["application/json"]["schema"] == error
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert "text/event-stream" in document["paths"][path]["post"]["responses"]["200"]["content"]


def test_the_document_says_where_a_key_is_needed(document):
    assert {tuple(way) for way in document["security"]} == {("bearer",), ("basic",)}
    open_paths = {p for p, item in document["paths"].items() if all(o.get("security") == [] for o in item.values())}
    assert open_paths == {"/health", "/ready"}


def test_every_reference_leads_somewhere(document):
    def references(value):
        if isinstance(value, dict):
            yield from ([value["$ref"]] if isinstance(value.get("$ref"), str) else [])
            value = value.values()
        for item in value if not isinstance(value, str | int | float | bool | None) else ():
            yield from references(item)

    found = set(references(document))
    assert found
    for reference in found:
        assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"]


def test_no_page_with_assets_from_elsewhere(live):
    for path in ("/docs", "/redoc"):
        assert live.ask("GET", path, Authorization=f"Bearer {KEY}").status == 404


OPERATIONS = [
    ("post", "/v1/completions"), ("post", "/v1/chat/completions"), ("post", "/v1/responses"),
    ("post", "/v1/messages"), ("post", "/v1/messages/count_tokens"), ("post", "/tokenize"), ("post", "/detokenize"),
    ("post", "/v1/embeddings"), ("post", "/v1/rerank"), ("post", "/v1/score"),
    ("get", "/v1/models"), ("get", "/v1/models/{name}"), ("get", "/version"),
]  # fmt: skip
CHECKS = [
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "negative_data_rejection", "allow_header_conformance",
]  # fmt: skip


@default_cases(4)
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_the_server_keeps_to_the_document(live, document, method, path, mode):
    """Generated requests, right and wrong ones: no 5xx, and every answer is as the document says."""
    schema = schemathesis.openapi.from_dict(document)
    schema.config.checks.negative_data_rejection.expected_statuses = ["4xx"]  # 413 too, for texts that are too long
    operation = schema[path][method]
    body = operation.definition.raw.get("requestBody")
    if mode == "NEGATIVE" and body is None:
        return  # there is nothing to get wrong
    checks = schemathesis.checks.CHECKS.get_by_names(CHECKS)
    examples = settings(
        max_examples=12 if body else 3, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip

    @examples
    @given(case=operation.as_strategy(schemathesis.GenerationMode[mode]))
    def keeps(case):
        response = case.call(base_url=f"http://127.0.0.1:{live.port}", headers={"Authorization": f"Bearer {KEY}"})
        case.validate_response(response, checks=checks)

    keeps()


def test_the_operations_are_all_there_are(document):
    others = {("get", "/health"), ("get", "/ready"), ("get", "/v1/health_check")}
    assert {(m, p) for p, item in document["paths"].items() for m in item} - others == set(OPERATIONS)
