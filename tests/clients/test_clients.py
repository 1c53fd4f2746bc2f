"""What clients of both APIs return when the server is llmc: chats, streams, tools, formats and errors."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tests.clients.conftest import FAMILIES, Client, Said
from tests.clients.server import CITIES, DAYS, FORECAST, GREETING, TWO_QUESTIONS, PlainServer, ScriptedServer

pytestmark = pytest.mark.real_client

CHATS = (
    "openai", "responses", "anthropic", "langchain", "langchain_responses", "litellm", "pydantic_ai", "agents",
    "smolagents", "llm",
)  # fmt: skip
STREAMS = tuple(name for name in CHATS if name != "llm")
"""The clients that give chunks of a stream to their caller; llm prints them."""
HISTORY_AS_TEXT = ("smolagents",)
"""The clients that send earlier calls as text of their own."""
STRUCTURED = (
    ("openai", "parse", ""), ("openai", "parse_streamed", ""), ("openai", "json_object", ""),
    ("responses", "parse", ""), ("langchain_responses", "structured", "json_schema"),
    ("langchain", "structured", "json_schema"), ("langchain", "structured", "json_mode"),
    ("litellm", "structured", ""), ("instructor", "structured", "JSON"),
    ("instructor", "structured", "JSON_SCHEMA"), ("instructor", "structured_streamed", "JSON_SCHEMA"),
    ("pydantic_ai", "structured", "native"), ("pydantic_ai", "structured", "prompted"), ("agents", "structured", ""),
    ("smolagents", "structured", ""), ("llm", "structured", ""),
)  # fmt: skip
"""Clients, their cases and parameters that answer in a response format."""
BY_TOOL = (
    ("openai", "parse_tool", ""), ("langchain", "structured", "function_calling"), ("anthropic", "parse_tool", ""),
    ("instructor", "structured", "TOOLS"), ("instructor", "structured_streamed", "TOOLS"),
    ("pydantic_ai", "structured", "tool"),
)  # fmt: skip
"""The same with a tool that must be called."""
Clients = Callable[[str], Client]
Servers = Callable[[str], ScriptedServer]


def require_loop(name: str, said: Said, server: ScriptedServer, cities: Sequence[str] = CITIES[:1]) -> None:
    """One call for each city with the right arguments, the results in the answer, and the calls in the next prompt."""
    assert sorted(said.calls) == [[city, DAYS] for city in cities]
    assert said.text == f"It is {' and '.join(f'{DAYS * 10 + 1} degrees in {city}' for city in cities)}. ☀️"
    assert said.usage is not None and min(said.usage) > 0
    assert len(server.prompts) == 2
    if name not in HISTORY_AS_TEXT:
        assert server.calls(cities) in server.prompts[-1]


@pytest.mark.parametrize("name", CHATS)
def test_an_answer_is_returned_whole_with_its_usage(name: str, clients: Clients, servers: Servers) -> None:
    server = servers("hermes")
    said = clients(name)("chat", server)
    assert said.text == GREETING
    (request,) = server.requests
    assert said.usage == [len(request.prompt_token_ids), len(GREETING.encode())]


@pytest.mark.parametrize("name", CHATS)
def test_a_stream_joins_to_the_whole_answer_with_its_usage(name: str, clients: Clients, servers: Servers) -> None:
    server = servers("hermes")
    said = clients(name)("stream", server)
    assert said.text == GREETING
    (request,) = server.requests
    assert said.usage == [len(request.prompt_token_ids), len(GREETING.encode())]
    if name in STREAMS:
        assert "".join(said.chunks) == GREETING and len(said.chunks) > 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CHATS)
def test_a_tool_is_called_and_its_result_answered(name: str, family: str, clients: Clients, servers: Servers) -> None:
    require_loop(name, clients(name)("loop", servers(family)), servers(family))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CHATS)
def test_a_tool_is_called_from_a_stream(name: str, family: str, clients: Clients, servers: Servers) -> None:
    said = clients(name)("loop_streamed", servers(family))
    require_loop(name, said, servers(family))
    if name in STREAMS and name != "smolagents":
        assert "".join(said.chunks) == said.text and len(said.chunks) > 1


@pytest.mark.parametrize("case", ["loop", "loop_streamed"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
@pytest.mark.parametrize("name", CHATS)
def test_two_calls_in_one_answer_are_both_answered(
    name: str, family: str, case: str, clients: Clients, servers: Servers
) -> None:
    said = clients(name)(case, servers(family), question=TWO_QUESTIONS)
    require_loop(name, said, servers(family), CITIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forced_call_is_what_its_grammar_takes(family: str, clients: Clients, servers: Servers) -> None:
    require_loop("openai", clients("openai")("loop", servers(family), "required"), servers(family))


@pytest.mark.parametrize(("name", "case", "parameter"), STRUCTURED)
def test_an_answer_in_a_format_is_parsed(
    name: str, case: str, parameter: str, clients: Clients, servers: Servers
) -> None:
    assert clients(name)(case, servers("hermes"), parameter).value == FORECAST


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("name", "case", "parameter"), BY_TOOL)
def test_a_tool_that_must_be_called_gives_the_answer(
    name: str, case: str, parameter: str, family: str, clients: Clients, servers: Servers
) -> None:
    assert clients(name)(case, servers(family), parameter).value == FORECAST


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("openai", ""),
        ("openai", "required"),
        ("responses", ""),
        ("agents", ""),
        ("pydantic_ai", "native"),
        ("pydantic_ai", "tool"),
    ],
)
def test_a_tool_is_called_before_an_answer_in_a_format(
    name: str, parameter: str, clients: Clients, servers: Servers
) -> None:
    said = clients(name)("loop_parsed", servers("hermes"), parameter)
    assert said.calls == [[CITIES[0], DAYS]]
    assert said.value == FORECAST


def test_an_asynchronous_client_gets_the_same(clients: Clients, servers: Servers) -> None:
    assert clients("openai")("chat_async", servers("hermes")).text == GREETING


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("openai", "context_length_exceeded"), ("responses", "context_length_exceeded"),
        ("anthropic", "invalid_request_error"), ("langchain_responses", "OpenAIContextOverflowError"),
        ("langchain", "OpenAIContextOverflowError"),
        ("litellm", "ContextWindowExceededError"), ("instructor", "InstructorRetryException"),
        ("pydantic_ai", "ModelContextWindowExceededError"), ("agents", "context_length_exceeded"),
        ("smolagents", "context_length_exceeded"), ("llm", "1"),
    ],
)  # fmt: skip
def test_a_prompt_that_is_too_long_is_the_clients_own_error(
    name: str, error: str, clients: Clients, servers: Servers
) -> None:
    said = clients(name)("too_long", servers("hermes"))
    assert error in said.text
    assert "maximum context length is 16384 tokens" in said.value


def test_a_model_that_is_not_served_is_not_found(clients: Clients, servers: Servers) -> None:
    assert clients("openai")("unknown_model", servers("hermes")).text == "model_not_found"


def scores(server: PlainServer, context: str, continuation: str) -> tuple[float, bool]:
    """The reference's log probability of a continuation, and whether each of its tokens is the most likely."""
    begin, tokens = len(server.encode(context)), server.encode(context + continuation)
    logits = server.reference.logits(tokens, range(begin - 1, len(tokens) - 1)).astype(np.float64)
    chosen = logits[np.arange(len(logits)), tokens[begin:]]
    return float((chosen - np.log(np.exp(logits).sum(1))).sum()), bool((chosen == logits.max(1)).all())


def test_lm_eval_scores_continuations_as_the_reference_does(clients: Clients, plain: PlainServer) -> None:
    likely = next(
        (letter, found)
        for letter in string.ascii_letters
        if (found := plain.decode(plain.reference.continued(plain.encode(letter), 1)[0])).isascii() and found.strip()
    )
    pairs = [("Hello", " you"), ("It is", " Köln."), ("a", "b"), likely]
    said = clients("lm_eval")("loglikelihood", plain, plain.tokenizer, json.dumps(pairs))
    expected = [scores(plain, *pair) for pair in pairs]
    assert [greedy for _, greedy in said.value] == [greedy for _, greedy in expected]
    assert expected[-1][1] and not expected[0][1]
    assert [score for score, _ in said.value] == pytest.approx([score for score, _ in expected], abs=1e-3)


def test_lm_eval_generates_what_the_reference_does(clients: Clients, plain: PlainServer) -> None:
    prompts = ["Hello ", "It is", "a"]
    given = [(prompt, {"until": ["\n"], "max_gen_toks": 5, "temperature": 0}) for prompt in prompts]
    said = clients("lm_eval")("generate_until", plain, plain.tokenizer, json.dumps(given))
    expected = [plain.decode(plain.reference.continued(plain.encode(prompt), 5)[0]) for prompt in prompts]
    assert said.value == [text.partition("\n")[0] for text in expected]
