"""/v1/chat/completions: messages in, one message or a stream of it out."""

from __future__ import annotations

import pytest

from tests.server.served import MODEL
from tests.server.stub_engine import events, joined, refusal


def prompt_of(api):
    """What the engine was given, as text."""
    return api.state.served.tokenizer.decode(api.engine.requests[-1].prompt_token_ids)


def content_of(chunks, index=0):
    choices = [c for e in chunks if e != "[DONE]" for c in e["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content") or "" for c in choices)


def test_the_answer_has_openais_shape(api):
    body = api.chat([{"role": "user", "content": "Hi"}], model="toy").json()
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    message = {"role": "assistant", "content": "Hello", "refusal": None}
    assert body == {
        "object": "chat.completion",
        "model": "toy",
        "choices": [
            {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ],
        "usage": {
            "prompt_tokens": 19, "completion_tokens": 5, "total_tokens": 24,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }  # fmt: skip
    assert prompt_of(api) == "user: Hi\nassistant:"


@pytest.mark.parametrize(
    "messages",
    [
        "Hi",
        [{"role": "user", "content": "Hi"}],
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "me"}],
    ],
)
def test_messages_are_a_list_or_one_users_text(api, messages):
    assert api.chat(messages).status_code == 200
    assert prompt_of(api) == "user: Hi\nassistant:"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"), (None, "messages"), ({}, "messages"), ([1], "messages[0]"), ([{}], "messages[0].role"),
        ([{"role": "boss", "content": "x"}], "messages[0].role"), ([{"role": "user"}], "messages"),
        ([{"role": "user", "content": 5}], "messages[0].content"), ([{"role": "user", "content": None}], "messages"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages"),
        ([{"role": "user", "content": "x", "name": {}}], "messages[0].name"),
    ],
)  # fmt: skip
def test_messages_that_are_not_so_are_refused(api, messages, param):
    error = refusal(api.chat(messages))
    assert error["param"] == param
    assert error["message"].startswith("messages")


def test_defaults_are_openais(api):
    api.chat()
    params = api.engine.params
    assert (params.max_tokens, params.temperature, params.n, params.logprobs) == (None, 1.0, 1, None)


def test_both_names_of_max_tokens_count_and_the_newer_one_wins(api):
    for given, expected in (({"max_tokens": 3}, 3), ({"max_completion_tokens": 4, "max_tokens": 9}, 4)):
        api.chat(**given)
        assert api.engine.requests[-1].params.max_tokens == expected


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(api):
    *chunks, done = events(api.chat(stream=True))
    assert done == "[DONE]"
    nothing = {"index": 0, "logprobs": None, "finish_reason": None}
    assert [c["choices"] for c in chunks] == [
        [{**nothing, "delta": {"role": "assistant", "content": ""}}],
        [{**nothing, "delta": {"content": "Hel"}}],
        [{**nothing, "delta": {"content": "lo"}}],
        [{**nothing, "delta": {}, "finish_reason": "stop", "stop_reason": None}],
    ]
    assert {(c["object"], c["model"]) for c in chunks} == {("chat.completion.chunk", "toy")}
    assert len({c["id"] for c in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-")


def test_a_stream_with_usage_ends_with_it(api):
    *chunks, last, _ = events(api.chat(stream=True, stream_options={"include_usage": True}))
    assert all(c["usage"] is None for c in chunks)
    assert (last["choices"], last["usage"]) == ([], api.chat().json()["usage"])


def test_every_choice_has_its_own_role_text_and_reason(api):
    chunks = events(api.chat(n=3, stream=True))
    assert [content_of(chunks, i) for i in range(3)] == ["Hello"] * 3
    for index in range(3):
        choices = [c for e in chunks[:-1] for c in e["choices"] if c["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in choices] == [None, None, None, "stop"]
    assert [c["message"]["content"] for c in api.chat(n=3).json()["choices"]] == ["Hello"] * 3


def test_logprobs_hold_tokens_bytes_and_the_most_probable(api):
    api.engine.pieces = ("A", "é")
    logprobs = api.chat(logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]
    top = [{"token": "b", "logprob": -1.0, "bytes": [98]}]
    assert logprobs == {
        "content": [
            {"token": "A", "logprob": -0.5, "bytes": [65], "top_logprobs": top},
            {"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3], "top_logprobs": top},
            {"token": "\ufffd", "logprob": -0.5, "bytes": [0xA9], "top_logprobs": top},
        ],
        "refusal": None,
    }
    chunks = [c["choices"][0] for c in events(api.chat(logprobs=True, top_logprobs=1, stream=True))[:-1]]
    pieces = [c["logprobs"]["content"] for c in chunks if c["logprobs"]]
    assert joined(pieces) == logprobs["content"]
    assert "".join(c["delta"].get("content", "") for c in chunks) == "Aé"
    assert api.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert refusal(api.chat(top_logprobs=1))["param"] == "top_logprobs"


def test_logprobs_of_tokens_whose_text_is_held_back_come_with_them(api):
    api.engine.pieces = ("A", "")
    chunks = events(api.chat(logprobs=True, stream=True))
    assert [c["choices"][0]["delta"] for c in chunks[1:-1]] == [{"content": "A"}, {}]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{}]), ("function_call", "auto"), ("audio", {"voice": "x"}), ("modalities", ["audio"]),
        ("modalities", "text"), ("web_search_options", {"x": 1}), ("echo", True), ("best_of", 2),
        ("chat_template", "{{ x }}"),
    ],
)  # fmt: skip
def test_what_is_known_and_not_served_is_refused_by_name(api, field, value):
    error = refusal(api.chat(**{field: value}))
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


def test_harmless_spellings_of_it_are_not(api):
    harmless = {"modalities": ["text"], "function_call": "none", "store": False, "audio": None, "best_of": 1}
    assert api.chat(**harmless, metadata={}, service_tier="auto", reasoning_effort="low").status_code == 200


def test_an_answer_may_go_on_where_the_last_message_ends(make_api):
    api = make_api(template="{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
                            "{% if add_generation_prompt %}<assistant>{% endif %}")  # fmt: skip
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "We"}]
    assert api.chat(messages, continue_final_message=True).status_code == 200
    assert prompt_of(api) == "<user>Hi</><assistant>We"
    api.chat(messages[:1], add_generation_prompt=False)
    assert prompt_of(api) == "<user>Hi</>"
    api.chat(messages[:1])
    assert prompt_of(api) == "<user>Hi</><assistant>"
    both = api.chat(messages, continue_final_message=True, add_generation_prompt=True)
    assert refusal(both)["param"] == "continue_final_message"
    assert refusal(api.chat("", continue_final_message=True))["param"] == "continue_final_message"


def test_the_template_sees_further_variables(make_api):
    api = make_api(template="{{ messages[0].content }}{{ mood }}")
    api.chat("Hi", chat_template_kwargs={"mood": "!"})
    assert prompt_of(api) == "Hi!"
    assert refusal(api.chat("Hi", chat_template_kwargs={"messages": []}))["message"].startswith(
        "chat template variable"
    )


def test_arguments_of_earlier_calls_reach_the_template_as_objects(make_api):
    api = make_api(
        template="{{ messages[0].tool_calls[0].function.arguments.x }}{{ messages[0].tool_calls[1] is none }}"
    )
    calls = [{"type": "function", "function": {"name": "f", "arguments": '{"x": "seen"}'}}, {"function": None}]
    assert api.chat([{"role": "assistant", "content": None, "tool_calls": calls}]).status_code == 200
    assert prompt_of(api) == "seenFalse"


def test_a_model_without_a_template_says_where_to_go(make_api):
    error = refusal(make_api(template=None).chat())
    assert "/v1/completions" in error["message"]


def test_a_template_that_fails_is_the_requests_fault(make_api):
    error = refusal(make_api(template="{{ raise_exception('roles must alternate') }}").chat())
    assert "roles must alternate" in error["message"]


def test_a_conversation_over_the_limit_is_reported_the_limit_and_its_length(api):
    error = refusal(api.chat("x" * 40))
    assert "57 tokens" in error["message"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def test_a_long_text_is_encoded_beside_the_loop_with_the_same_result(api, monkeypatch):
    for name in ("SMALL", "LARGE"):
        monkeypatch.setattr(f"llmc.server.aside.{name}", 1)
        assert api.chat("Hi").status_code == 200
        assert api.engine.requests.pop() is not None
    assert api.chat("Hi").status_code == 200
    assert prompt_of(api) == "user: Hi\nassistant:"


def test_token_ids_are_returned_where_requested(api):
    body = api.chat(return_token_ids=True).json()
    assert body["prompt_token_ids"] == list(api.engine.requests[0].prompt_token_ids)
    chunks = [c["choices"][0] for c in events(api.chat(return_token_ids=True, stream=True))[:-1]]
    assert chunks[0]["prompt_token_ids"] == body["prompt_token_ids"]
    assert joined(c.get("token_ids", []) for c in chunks) == body["choices"][0]["token_ids"]


class TestTokenize:
    def test_of_a_prompt(self, served):
        answer = served.post("/tokenize", {"prompt": "Hi", "model": MODEL}).json()
        assert answer == {"count": 2, "max_model_len": 32, "tokens": [39, 72]}
        assert served.post("/tokenize", {"prompt": "Hi", "return_token_strs": True}).json()["token_strs"] == ["H", "i"]
        assert served.post("/tokenize", {"prompt": ""}).json()["count"] == 0

    def test_of_a_conversation_longer_than_the_model_takes(self, served):
        answer = served.post("/tokenize", {"messages": [{"role": "user", "content": "x" * 50}]}).json()
        assert answer["count"] == 67
        text = served.post("/detokenize", {"tokens": answer["tokens"]}).json()
        assert text == {"prompt": f"user: {'x' * 50}\nassistant:"}

    @pytest.mark.parametrize("body", [{}, {"prompt": "x", "messages": "y"}, {"prompt": 5}, {"messages": []}])
    def test_needs_one_of_them(self, served, body):
        refusal(served.post("/tokenize", body))

    @pytest.mark.parametrize("tokens", [[-1], ["a"], "ab", None, [1 << 40], [1.5]])
    def test_back_takes_token_ids_only(self, served, tokens):
        assert refusal(served.post("/detokenize", {"tokens": tokens}))["param"].startswith("tokens")

    def test_ids_without_a_token_have_no_text(self, served):
        assert served.post("/detokenize", {"tokens": [39, 1 << 30]}).json() == {"prompt": "H"}

    def test_answers_for_its_model_only(self, served):
        refusal(served.post("/tokenize", {"prompt": "x", "model": "other"}), 404)
        refusal(served.post("/detokenize", {"tokens": [], "model": "other"}), 404)


def test_models_are_listed_and_found(make_api):
    api = make_api()
    (entry,) = api.get("/v1/models").json()["data"]
    assert entry == {
        "id": "toy", "object": "model", "created": int(api.state.started_at), "owned_by": "llmc", "max_model_len": 32,
        "root": "toy", "parent": None, "default_sampling_params": {},
    }  # fmt: skip
    assert api.get("/v1/models/toy").json() == entry
    assert refusal(api.get("/v1/models/some/other"), 404)["code"] == "model_not_found"


def test_embeddings_are_refused_clearly(api):
    error = refusal(api.post("/v1/embeddings", {"input": "x", "model": "toy"}))
    assert "the served model generates text; embeddings needs one compiled to embed" in error["message"]


def test_the_version_is_reported(api):
    from llmc import __version__

    assert api.get("/version").json() == {"version": __version__}
