"""Every list, text and object of a body has a stated bound, seen before anything in it is looked at."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from llmc.runtime.text.confined_encoding import LONG
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.server import aside
from llmc.server.app import BODIES
from llmc.server.protocol import base as bounds
from llmc.server.routes import common
from tests.server.served import Served
from tests.server.stub_engine import Api, refusal

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"


def nodes(schema: Any, path: str = "") -> Any:
    """All schemas inside one, with where they are."""
    if isinstance(schema, dict):
        yield path, schema
        for name, inner in schema.items():
            if name != "properties":
                yield from nodes(inner, f"{path}/{name}")
        for name, inner in schema.get("properties", {}).items():
            yield from nodes(inner, f"{path}/{name}")
    elif isinstance(schema, list):
        for index, inner in enumerate(schema):
            yield from nodes(inner, f"{path}/{index}")


@pytest.mark.parametrize("model", BODIES)
def test_every_list_text_and_object_says_how_much_it_takes(model: Any) -> None:
    for path, schema in nodes(model.model_json_schema()):
        kind = schema.get("type")
        if kind == "string" and not schema.keys() & {"enum", "const"}:
            assert "maxLength" in schema, path
        if kind == "array":
            assert "maxItems" in schema, path
        if kind == "object" and "properties" not in schema:
            assert "maxProperties" in schema, path


TEXT = "x" * (bounds.MAX_NAME + 1)
BEYOND = {
    "messages": ([{"role": "user", "content": "x"}] * (bounds.MAX_MESSAGES + 1), "items", bounds.MAX_MESSAGES),
    "tools": ([{}] * (bounds.MAX_TOOLS + 1), "items", bounds.MAX_TOOLS),
    "chat_template_kwargs": (dict.fromkeys(map(str, range(bounds.MAX_KEYS + 1))), "members", bounds.MAX_KEYS),
    "stop": (["x"] * (bounds.MAX_STOPS + 1), "items", bounds.MAX_STOPS),
    "stop_token_ids": ([5] * (bounds.MAX_STOP_IDS + 1), "items", bounds.MAX_STOP_IDS),
    "allowed_token_ids": ([5] * (bounds.MAX_ALLOWED_IDS + 1), "items", bounds.MAX_ALLOWED_IDS),
    "bad_words": (["x"] * (bounds.MAX_BAD_WORDS + 1), "items", bounds.MAX_BAD_WORDS),
    "logit_bias": (dict.fromkeys(map(str, range(bounds.MAX_BIASES + 1)), 0), "members", bounds.MAX_BIASES),
    "guided_choice": (["x"] * (bounds.MAX_CHOICES + 1), "items", bounds.MAX_CHOICES),
    "guided_regex": ("x" * (bounds.MAX_GRAMMAR + 1), "characters", bounds.MAX_GRAMMAR),
    "guided_json": ({"x" * 7 + str(i): 1 for i in range(bounds.MAX_KEYS + 1)}, "members", bounds.MAX_KEYS),
    "model": (TEXT, "characters", bounds.MAX_NAME),
    "user": (TEXT, "characters", bounds.MAX_NAME),
}


@pytest.mark.parametrize("field", BEYOND)
def test_beyond_its_bound_a_field_is_refused_with_the_bound_and_what_was_sent(served: Served, field: str) -> None:
    value, unit, most = BEYOND[field]
    error = refusal(served.chat(**{"messages": "x", field: value}))
    assert error["message"] == f"{field} has {len(value)} {unit}; at most {most} are taken"
    assert error["param"] == field


INSIDE = {
    "messages[0].content": {"messages": [{"role": "user", "content": ["x"] * (bounds.MAX_PARTS + 1)}]},
    "messages[0].tool_calls": {"messages": [{"role": "assistant", "tool_calls": [{}] * (bounds.MAX_CALLS + 1)}]},
    "messages[0].name": {"messages": [{"role": "user", "content": "", "name": TEXT}]},
    "stop[1]": {"stop": ["x", "x" * (bounds.MAX_STOP + 1)]},
    "stop": {"stop": "x" * (bounds.MAX_STOP + 1)},
    "bad_words[0]": {"bad_words": ["x" * (bounds.MAX_BAD_WORD + 1)]},
    "tools[0].function.name": {"tools": [{"type": "function", "function": {"name": TEXT}}]},
}


@pytest.mark.parametrize("field", INSIDE)
def test_what_stands_inside_is_named_by_its_place(served: Served, field: str) -> None:
    error = refusal(served.chat(**{"messages": "x", **INSIDE[field]}))
    assert re.fullmatch(re.escape(field) + r" has \d+ (items|characters); at most \d+ are taken", error["message"])


def test_a_number_of_prompts_is_refused_before_any_is_tokenised(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(api.engine.tokenizer), "encode_last", lambda *_: pytest.fail("tokenised"))
    error = refusal(api.complete(prompt=["x"] * (bounds.MAX_PROMPTS + 1)))
    assert error["message"] == f"prompt has {bounds.MAX_PROMPTS + 1} items; at most {bounds.MAX_PROMPTS} are taken"
    assert "asks for 100 sequences" in refusal(api.complete(prompt=["x"] * 100))["message"]


def test_a_prompt_that_no_tokens_could_shorten_is_refused_before_it_is_tokenised(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(api.engine.tokenizer), "encode_last", lambda *_: pytest.fail("tokenised"))
    for error in (refusal(api.complete(prompt="x" * 1000)), refusal(api.chat("x" * 1000))):
        assert error["code"] == "context_length_exceeded"
        assert re.search(r"has 10\d\d characters, which are at least 14\d tokens; .* 32 tokens", error["message"])


def test_long_texts_are_tokenised_in_another_process(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    encode_last = Tokenizer.encode_last

    def seen(self: Tokenizer, text: str, *how: Any, **named: Any) -> Any:
        assert len(text) < LONG, "tokenised here"
        return encode_last(self, text, *how, **named)

    monkeypatch.setattr(Tokenizer, "encode_last", seen)
    text = "x" * (LONG + 1)
    error = refusal(api.post("/tokenize", {"prompt": text}))
    assert error["message"] == f"the text has {len(text)} tokens; at most {bounds.MAX_IDS} are returned"
    assert api.complete(prompt=text + "yz", truncate_prompt_tokens=3).status_code == 200
    assert api.engine.tokenizer.decode(api.engine.requests[-1].prompt_token_ids) == "xyz"


def test_a_full_queue_is_reported_before_work_is_done(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.errors import OverloadedError

    def full() -> None:
        raise OverloadedError("the queue is full", 1.0)

    monkeypatch.setattr(api.engine, "check_room", full)
    monkeypatch.setattr(type(api.engine.tokenizer), "encode_last", lambda *_: pytest.fail("tokenised"))
    for answer in (api.complete(), api.chat()):
        assert refusal(answer, 503)["code"] == "overloaded"


WRONG = {
    "content": {"messages": [{"role": "user", "content": [5] * 200_000}]},
    "tools": {"messages": "x", "tools": [5] * 200_000},
    "messages": {"messages": [5] * 200_000},
    "logit_bias": {"messages": "x", "logit_bias": {str(i): "x" for i in range(60_000)}},
    "stop": {"messages": "x", "stop": [5] * 200_000},
    "many parts": {"messages": [{"role": "user", "content": [5] * 1000}] * 200},
    "ids": {"messages": "x", "allowed_token_ids": ["x"] * 131_072},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_thousand_faults_cost_what_one_does(api: Api, name: str) -> None:
    """Of 200,000 errors none but the first few are made: that took 5 s."""
    raw = json.dumps(WRONG[name]).encode()
    began = time.process_time()
    refusal(api.raw("/v1/chat/completions", raw))
    assert time.process_time() - began < 1.5


@pytest.mark.parametrize("wrong", ["x", -1, 1 << 31])
def test_the_first_fault_of_a_long_list_is_named_by_its_place(api: Api, wrong: Any) -> None:
    ids = [*range(9000), wrong, "y"]
    error = refusal(api.post("/detokenize", {"tokens": ids}))
    alone = refusal(api.post("/detokenize", {"tokens": [wrong]}))
    assert error["message"] == alone["message"].replace("tokens[0]", "tokens[9000]")


def test_a_long_body_is_read_beside_the_event_loop(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    read_json, threads = common.read_json, []

    def watched(raw: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return read_json(raw)

    monkeypatch.setattr(common, "read_json", watched)
    assert api.complete(user="x", n=1).status_code == 200
    assert api.raw("/v1/completions", b'{"prompt": "Hi"}' + b" " * aside.LARGE).status_code == 200
    assert [name.startswith("llmc-long") for name in threads] == [False, True]
    assert api.state.held_bytes == 0


def test_long_bodies_are_held_up_to_a_bound_together(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request may always go on: what it holds itself keeps none out."""
    monkeypatch.setattr(common, "MAX_HELD", 1000)
    raw = b'{"prompt": "Hi"}' + b" " * (aside.LARGE + 2000)
    assert api.raw("/v1/completions", raw).status_code == 200
    api.state.held_bytes = 900
    answer = api.raw("/v1/completions", raw)
    assert refusal(answer, 503)["code"] == "overloaded"
    assert int(answer.headers["retry-after"]) >= 1
    assert api.complete().status_code == 200
    assert api.state.held_bytes == 900


def test_the_documents_table_has_every_bound() -> None:
    text = DOCS.read_text()
    for name, value in vars(bounds).items():
        if name.startswith("MAX_") and name != "MAX_CHOICE":
            assert f"| {value:,} |" in text, name
