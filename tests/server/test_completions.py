"""/v1/completions: what may be asked for, and how it is answered, whole and streamed."""

from __future__ import annotations

import math

import pytest

from llmc.runtime.engine.sampling.batch import TokenLogprobs
from llmc.server.protocol.answers import chat_logprobs, completion_logprobs
from tests.server.stub_engine import events, joined, refusal


def text_of(chunks, index=0):
    return "".join(c["text"] for e in chunks if e != "[DONE]" for c in e["choices"] if c["index"] == index)


def test_the_answer_has_openais_shape(api):
    api.engine.cached_tokens = 1
    body = api.complete(model="toy").json()
    assert body.pop("id").startswith("cmpl-")
    assert abs(body.pop("created") - api.state.started_at) < 60
    assert body == {
        "object": "text_completion",
        "model": "toy",
        "choices": [
            {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ],
        "usage": {
            "prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("Hi", 1), (["Hi", "Hi"], 2), ([39, 72], 1), ([[39, 72], [39, 72], [39, 72]], 3)],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_takes_prompts_in_all_four_forms(api, prompt, count):
    body = api.complete(prompt=prompt).json()
    assert [r.prompt_token_ids for r in api.engine.requests] == [[39, 72]] * count
    assert len({r.request_id for r in api.engine.requests}) == count
    assert [c["index"] for c in body["choices"]] == list(range(count))
    assert body["usage"]["prompt_tokens"] == 2 * count


@pytest.mark.parametrize(
    "prompt", [[], "", [""], [[]], {}, None, 5, [1, "a"], [1.5], [True], [[1], "a"], [-1], [1 << 40]]
)
def test_refuses_what_is_no_prompt(api, prompt):
    assert refusal(api.complete(prompt=prompt))["param"] == "prompt"
    assert not api.engine.requests


def test_needs_a_prompt(api):
    error = refusal(api.post("/v1/completions", {"max_tokens": 3}))
    assert (error["message"], error["param"]) == ("prompt is required", "prompt")


def test_choices_of_several_prompts_are_numbered_through(api):
    api.engine.pieces = ("a",)
    body = api.complete(prompt=["x", "y"], n=2, return_token_ids=True).json()
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    ids = [c["prompt_token_ids"] for c in body["choices"]]
    assert ids[0] == ids[1] != ids[2] == ids[3]
    assert body["usage"]["completion_tokens"] == 4
    chunks = events(api.complete(prompt=["x", "y"], n=2, stream=True))
    assert [text_of(chunks, i) for i in range(4)] == ["a"] * 4


def test_defaults_are_openais(api):
    api.complete()
    params = api.engine.params
    assert (params.max_tokens, params.temperature, params.n, params.top_p) == (16, 1.0, 1, 1.0)
    assert (params.logprobs, params.structured_outputs) == (None, None)
    assert api.engine.requests[0].priority == 0


GIVEN = {
    "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "typical_p": 0.8, "n": 3,
    "best_of": 4, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "seed": -3,
    "ignore_eos": True, "min_tokens": 2, "include_stop_str_in_output": True, "skip_special_tokens": False,
    "logprobs": 3,
}  # fmt: skip


def test_everything_that_is_given_reaches_the_engine(api):
    lists = {"stop": ["x", "yz"], "stop_token_ids": [5, 6], "allowed_token_ids": [1, 2], "bad_words": ["no"]}
    answer = api.complete(**GIVEN, **lists, logit_bias={"7": -1}, priority=-2)
    assert answer.status_code == 200, answer.text
    params = api.engine.params
    assert {name: getattr(params, name) for name in GIVEN} == GIVEN
    assert {name: list(getattr(params, name)) for name in lists} == lists
    assert params.logit_bias == {7: -1.0}
    assert api.engine.requests[0].priority == -2


def test_null_is_the_default(api):
    lists = ("stop", "stop_token_ids", "logit_bias", "suffix", "user", "model", "stream", "stream_options", "echo")
    answer = api.complete(**dict.fromkeys([*GIVEN, *lists, "response_format", "structured_outputs", "priority"]))
    assert answer.status_code == 200, answer.text
    assert api.engine.params.max_tokens == 16


def test_one_stop_text_and_either_name_of_max_tokens(api):
    api.complete(stop="x", max_completion_tokens=3)
    assert (api.engine.params.stop, api.engine.params.max_tokens) == (("x",), 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("temperature", "1"), ("temperature", True), ("top_p", 0), ("top_p", 1.5), ("n", 0),
        ("n", 129), ("n", 1.5), ("max_tokens", -2), ("max_tokens", "5"), ("max_tokens", 10**30), ("top_k", -2),
        ("stop", [1]), ("stop", [""]), ("logit_bias", {"1": 200}), ("logit_bias", {"x": 1}), ("logit_bias", [1]),
        ("seed", 1 << 65), ("logprobs", 21), ("logprobs", -1), ("stream", 1), ("presence_penalty", 3),
        ("stop_token_ids", ["a"]), ("typical_p", 0), ("min_tokens", 17), ("truncate_prompt_tokens", 0),
        ("priority", "high"), ("best_of", 0), ("stream_options", {"include_usage": True}), ("allowed_token_ids", []),
    ],
)  # fmt: skip
def test_a_value_that_makes_no_sense_is_refused_by_name(api, field, value):
    error = refusal(api.complete(**{field: value}))
    assert error["message"].startswith(field)
    assert error["param"].split(".")[0].split("[")[0] == field
    assert error["type"] == "invalid_request_error"
    assert not api.engine.requests


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "end"), ("prompt_logprobs", 0), ("use_beam_search", True), ("logits_processors", ["x"]),
        ("prompt_embeds", "abc"),
    ],
)  # fmt: skip
def test_what_is_known_and_not_served_is_refused_by_name(api, field, value):
    error = refusal(api.complete(**{field: value}))
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


def test_what_is_not_known_is_ignored(api, caplog):
    caplog.set_level("DEBUG", "llmc")
    for _ in range(2):
        assert api.complete(a_field_of_tomorrow={"x": 1}, suffix="", use_beam_search=False).status_code == 200
    assert [m for m in caplog.messages if "a_field_of_tomorrow" in m] == [
        "requests carry the unknown field 'a_field_of_tomorrow', which is ignored"
    ]


def test_best_of_that_cannot_be_is_refused(api):
    assert refusal(api.complete(n=3, best_of=2))["param"] == "best_of"
    assert refusal(api.complete(best_of=2, stream=True))["param"] == "best_of"
    assert api.complete(n=2, best_of=2, stream=True).status_code == 200


def test_echo_puts_the_prompt_before_each_text(api):
    body = api.complete(prompt=["Hi", "Yo"], echo=True).json()
    assert [c["text"] for c in body["choices"]] == ["HiHello", "YoHello"]
    assert api.complete(prompt=[39, 72], echo=True).json()["choices"][0]["text"] == "HiHello"
    assert text_of(events(api.complete(echo=True, stream=True))) == "HiHello"


@pytest.mark.parametrize("prompt", ["abcdefgh" * 5, "abc"])
@pytest.mark.parametrize(("keep", "left"), [(2, 2), (-1, 31), (31, 31)])
def test_a_prompt_is_cut_from_the_left_where_that_is_requested(api, prompt, keep, left):
    answer = api.complete(prompt=prompt, truncate_prompt_tokens=keep, echo=True).json()
    kept = prompt[-left:]
    assert len(api.engine.requests[0].prompt_token_ids) == len(kept) == answer["usage"]["prompt_tokens"]
    assert answer["choices"][0]["text"] == f"{kept}Hello"


def test_a_prompt_over_the_limit_is_reported_the_limit_and_its_length(api):
    error = refusal(api.complete(prompt="x" * 40))
    assert "40 tokens" in error["message"]
    assert "at most 31" in error["message"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


def test_more_sequences_than_could_ever_be_queued_are_a_fault_of_the_request(make_api):
    api = make_api(max_queued_requests=2)
    assert api.complete(prompt=["x"] * 6).status_code == 200
    assert "at most 6" in refusal(api.complete(prompt=["x"] * 7))["message"]
    assert "at most 6" in refusal(api.complete(n=7))["message"]


def test_logprobs_are_given_for_each_token(api):
    api.engine.pieces = ("A", "é")
    logprobs = api.complete(logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["A", "\ufffd", "\ufffd"],
        "token_logprobs": [-0.5] * 3,
        "text_offset": [0, 1, 2],
        "top_logprobs": [{"b": -1.0, "c": -2.0, t: -0.5} for t in ("A", "\ufffd", "\ufffd")],
    }
    assert api.complete(logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"][0] == {"A": -0.5}


def test_impossible_tokens_have_a_finite_logprob(toy):
    never = TokenLogprobs(65, -math.inf, 9, ((66, -math.inf),))
    plain = completion_logprobs(toy.tokenizer, [never])
    assert plain["token_logprobs"] == [-9999.0]
    assert set(plain["top_logprobs"][0].values()) == {-9999.0}
    (entry,) = chat_logprobs(toy.tokenizer, [never])["content"]
    assert [entry["logprob"], entry["top_logprobs"][0]["logprob"]] == [-9999.0] * 2


def test_streamed_logprobs_are_the_same_in_pieces(api):
    whole = api.complete(logprobs=1).json()["choices"][0]["logprobs"]
    chunks = [c["choices"][0]["logprobs"] for c in events(api.complete(logprobs=1, stream=True))[:-1]]
    assert len(chunks) == 2
    assert {name: joined(c[name] for c in chunks) for name in whole} == whole


def test_a_stream_is_chunks_with_text_then_done(api):
    *chunks, done = events(api.complete(stream=True))
    assert done == "[DONE]"
    assert [c["choices"] for c in chunks] == [
        [{"index": 0, "text": "Hel", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "lo", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
    ]
    assert len({c["id"] for c in chunks}) == 1
    assert {(c["object"], c["model"]) for c in chunks} == {("text_completion", "toy")}
    assert all(list(c) == ["id", "object", "created", "model", "choices"] for c in chunks)


def test_a_stream_with_usage_ends_with_it(api):
    *chunks, last, done = events(api.complete(stream=True, stream_options={"include_usage": True}))
    assert done == "[DONE]"
    assert [c["usage"] for c in chunks] == [None, None]
    assert last["choices"] == []
    assert last["usage"] == api.complete().json()["usage"]


def test_text_that_is_held_back_makes_no_chunk(api):
    api.engine.pieces = ("", "a", "", "")
    assert [c["choices"][0]["text"] for c in events(api.complete(stream=True))[:-1]] == ["a", ""]


@pytest.mark.parametrize("text", ['q"\\\n\u2028', "é😀", "</script>", "data: x\n\n"])
def test_a_streams_text_is_the_whole_text_whatever_it_is(api, text):
    api.engine.pieces = (text, text)
    assert text_of(events(api.complete(stream=True))) == api.complete().json()["choices"][0]["text"] == text * 2


def test_token_ids_are_returned_where_requested(api):
    choice = api.complete(return_token_ids=True).json()["choices"][0]
    assert choice["prompt_token_ids"] == [39, 72]
    chunks = [c["choices"][0] for c in events(api.complete(return_token_ids=True, stream=True))[:-1]]
    assert chunks[0]["prompt_token_ids"] == [39, 72]
    assert joined(c["token_ids"] for c in chunks) == choice["token_ids"]
    assert len(choice["token_ids"]) == 5


@pytest.mark.parametrize(("finish", "reason"), [("stop", "END"), ("stop", 5), ("length", None)])
def test_why_it_ended_is_reported(api, finish, reason):
    api.engine.finish, api.engine.stop_reason = finish, reason
    for choice in (api.complete().json()["choices"][0], events(api.complete(stream=True))[-2]["choices"][0]):
        assert (choice["finish_reason"], choice["stop_reason"]) == (finish, reason)


def test_the_model_may_be_left_out_and_is_otherwise_the_one_served(api):
    assert api.complete().json()["model"] == "toy"
    error = refusal(api.complete(model="gpt-4"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "'toy'" in error["message"]


@pytest.mark.parametrize(
    "requested",
    [
        {"guided_json": {"type": "object"}}, {"guided_regex": "a+"}, {"guided_choice": ["a", "b"]},
        {"guided_grammar": 'start: "a"'}, {"structured_outputs": {"json": {"type": "object"}}},
        {"structured_outputs": {"regex": "a+"}}, {"structured_outputs": {"choice": ["a", "b"]}},
        {"structured_outputs": {"grammar": 'start: "a"'}}, {"structured_outputs": {"json_object": True}},
        {"response_format": {"type": "json_object"}}, {"guided_json": '{"type": "object"}'},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
    ],
)  # fmt: skip
def test_what_the_text_must_be_can_be_said_in_several_ways(api, requested):
    assert api.complete(**requested).status_code == 200
    built = api.engine.params.structured_outputs
    ((name, value),) = requested.items()
    if name.startswith("guided"):
        kind = name.removeprefix("guided_")
    elif name == "structured_outputs":
        ((kind, value),) = value.items()
    else:
        kind = {"json_object": "json_object", "json_schema": "json"}[value["type"]]
        value = True if kind == "json_object" else value["json_schema"]["schema"]
    assert built.kind == kind
    if kind == "json":
        assert built.json == '{"type": "object"}'
    else:
        assert getattr(built, kind) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("requested", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
    ],
)
def test_a_form_that_cannot_be_is_refused_by_name(api, requested, param):
    assert refusal(api.complete(**requested))["param"] == param
