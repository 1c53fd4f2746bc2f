"""What clients of OpenAI's, vLLM's and llama.cpp's servers send: honoured, or refused by name."""

from __future__ import annotations

import json

import pytest

from tests.server.stub_engine import events, refusal

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize("field", ["max_tokens", "n", "seed", "top_k", "min_tokens"])
def test_whole_numbers_may_be_written_as_floats(make_api, field):
    api = make_api()
    assert api.complete(**{field: 1.0}).status_code == 200
    assert getattr(api.engine.params, field) == 1 and type(getattr(api.engine.params, field)) is int
    assert refusal(api.complete(**{field: 1.5}))["param"] == field
    assert refusal(api.complete(**{field: "1"}))["param"] == field


def test_minus_one_is_no_limit_of_tokens(make_api):
    api = make_api()
    assert api.complete(max_tokens=-1).status_code == 200
    assert api.engine.params.max_tokens is None
    assert refusal(api.complete(max_tokens=-2))["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json"),
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"json_schema": SCHEMA}, "json"),
        ({"grammar": 'root ::= "a" | "b"'}, "grammar"),
        ({"grammar": 'start: "a" | "b"'}, "grammar"),
    ],
)
def test_constraints_by_the_names_of_other_servers_apply(make_api, given, kind):
    api = make_api()
    assert api.chat(**given).status_code == 200
    structured = api.engine.params.structured_outputs
    assert structured.kind == kind
    if kind == "json":
        assert json.loads(structured.json) == SCHEMA
    if kind == "grammar":
        assert "start:" in structured.grammar


@pytest.mark.parametrize("field", ["regex", "ebnf", "structural_tag", "format"])
def test_constraints_that_do_not_apply_are_refused_by_name(make_api, field):
    assert refusal(make_api().chat(**{field: "a"}))["param"] == field


def test_two_constraints_exclude_one_another(make_api):
    error = refusal(make_api().chat(json_schema=SCHEMA, grammar='root ::= "a"'))
    assert "json_schema and grammar exclude one another" in error["message"]


def test_a_grammar_that_is_none_is_refused(make_api):
    assert refusal(make_api().chat(grammar="root ::= (("))["param"] == "grammar"


def test_a_keyword_that_cannot_be_followed_is_named_in_the_clients_own_field(served):
    unique = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": unique}}
    error = refusal(served.chat(response_format=wanted))
    assert error["param"] == "response_format" and "uniqueItems" in error["message"]
    assert "structured_outputs" not in error["message"]
    assert refusal(served.chat(guided_json=unique))["param"] == "guided_json"


def test_a_prompt_that_is_too_long_is_named_in_the_words_that_clients_look_for(api):
    error = refusal(api.complete(prompt="x" * 100))
    assert error["code"] == "context_length_exceeded"
    assert "this model's maximum context length is 32 tokens" in error["message"]


RECOMMENDED = {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize("wanted", [True, False])
def test_requests_take_what_the_checkpoint_recommends_unless_they_say_otherwise(make_api, monkeypatch, wanted):
    api = make_api(generation_config=wanted)
    monkeypatch.setitem(api.state.served.bundle.manifest.model, "sampling", {**RECOMMENDED, "top_p": 7, "n": 2})
    for send in (api.chat, api.complete):
        assert send(top_k=5).status_code == 200
        params = api.engine.requests[-1].params
        assert (params.temperature, params.top_k) == (0.6 if wanted else 1.0, 5)
    (entry,) = api.get("/v1/models").json()["data"]
    assert entry["default_sampling_params"] == (RECOMMENDED if wanted else {})


ASKS = {
    "Origin": "https://chat.example", "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}  # fmt: skip


@pytest.mark.parametrize("origins", [("*",), ("https://chat.example",)])
def test_pages_of_allowed_origins_may_ask_before_they_have_a_key(make_api, origins):
    api = make_api(api_keys=("secret",), allowed_origins=origins)
    answer = api.ask("OPTIONS", "/v1/chat/completions", headers=ASKS)
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers["access-control-allow-origin"] == origins[0]
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert api.get("/v1/models", **{"Origin": ASKS["Origin"]}).headers["access-control-allow-origin"] == origins[0]
    assert api.get("/v1/models").status_code == 401


def test_other_origins_are_not_allowed(make_api):
    api = make_api(allowed_origins=("https://chat.example",))
    answer = api.ask("OPTIONS", "/v1/chat/completions", headers={**ASKS, "Origin": "https://other.example"})
    assert answer.status_code == 400 and "access-control-allow-origin" not in answer.headers
    assert make_api().ask("OPTIONS", "/v1/chat/completions", headers=ASKS).status_code == 405


def test_every_chunk_has_the_usage_so_far_if_wanted(make_api):
    for path, body in (("/v1/chat/completions", {"messages": "Hi"}), ("/v1/completions", {"prompt": "Hi"})):
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = events(make_api().post(path, {**body, "stream": True, "stream_options": options}))[:-1]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] > 0 and chunks[-1]["choices"] == []


def test_tokens_of_log_probabilities_may_be_shown_as_ids(served):
    answer = served.complete(logprobs=2, max_tokens=2, return_tokens_as_token_ids=True, return_token_ids=True)
    (choice,) = answer.json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{index}" for index in choice["token_ids"]]
    assert all(len(top) in (2, 3) for top in choice["logprobs"]["top_logprobs"])
    (choice,) = served.chat(logprobs=True, max_tokens=2, return_tokens_as_token_ids=True).json()["choices"]
    assert all(one["token"].startswith("token_id:") for one in choice["logprobs"]["content"])
