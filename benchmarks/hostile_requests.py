"""Requests that would harm others if the server let them: what hostile.py sends, and, the cheap ones, a test.

Each is bytes for one connection, `copies` of them at a time; what the server answers has to be a 2xx or a 4xx, or a 503
of a bounded queue with Retry-After, or a connection that it closes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20
CHAT, COMPLETE, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
MOST = 1 << 63


@dataclass(frozen=True)
class Attack:
    """`make` gives the bytes, `shape` how they are sent: whole; slow, a byte now and then; leave, and go at once; deaf,
    never reading the answer. Cheap ones take no second of anyone's time."""

    name: str
    make: Callable[[], bytes]
    copies: int = 1
    shape: str = "whole"
    cheap: bool = True


def head(method: str, path: str, *headers: str, close: bool = True) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: x", *(["connection: close"] if close else []), *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def post(path: str, body: bytes, *headers: str) -> bytes:
    return head("POST", path, "content-type: application/json", f"content-length: {len(body)}", *headers) + body


def chat(**fields: Any) -> bytes:
    return post(CHAT, json.dumps({"messages": "x", "max_tokens": 4, **fields}).encode())


def complete(**fields: Any) -> bytes:
    return post(COMPLETE, json.dumps({"prompt": "x", "max_tokens": 4, **fields}).encode())


def chunked(*chunks: bytes) -> bytes:
    framed = b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in chunks)
    start = head("POST", TOKENIZE, "content-type: application/json", "transfer-encoding: chunked")
    return start + framed + b"0\r\n\r\n"


def chained(links: int, link: Callable[[int], Any]) -> dict[str, Any]:
    """A schema of definitions, each of which names the next."""
    definitions = {f"d{i}": link(i + 1) for i in range(links)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{links}": {"type": "integer"}}}


def ref(i: int) -> dict[str, Any]:
    return {"$ref": f"#/$defs/d{i}"}


def said(role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": "x", **fields}


FIVES = [5] * 1_200_000
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {f"k{i}": {"enum": [f"v{j}" for j in range(20)]} for i in range(400)}}
RULES = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(2000)) + 'r2000: "a"\n'

REPORTED = [
    Attack("content of numbers, 3.6 MB", lambda: chat(messages=[said(content=FIVES)])),
    Attack("tools of numbers, 3.6 MB", lambda: chat(tools=FIVES)),
    Attack("a prompt of 4 MB", lambda: complete(prompt="lorem ipsum " * 340_000), cheap=False),
    Attack("a chat of 4 MB", lambda: chat(messages="lorem ipsum " * 340_000), cheap=False),
    Attack("a million prompts", lambda: post(COMPLETE, b'{"prompt": [' + b'"",' * 1_000_000 + b'"x"]}')),
    Attack("700,000 bad words", lambda: complete(bad_words=["a"] * 700_000)),
    Attack("100,000 messages", lambda: chat(messages=[said()] * 100_000)),
    Attack("700,000 stop strings", lambda: complete(stop=["q"] * 700_000)),
    Attack("2,000 chained $defs", lambda: chat(guided_json=chained(2000, ref)), cheap=False),
    Attack("1,000 chained anyOf", lambda: chat(guided_json=chained(1000, lambda i: {"anyOf": [ref(i)]})), cheap=False),
    Attack(
        "2,600 chained properties",
        lambda: chat(guided_json=chained(2600, lambda i: {"properties": {"a": ref(i)}})),
        cheap=False,
    ),
    Attack("2,000 chained rules", lambda: chat(guided_grammar=RULES), cheap=False),
    Attack("an expression of 960 kB", lambda: chat(guided_regex="(a|b)[^c]{2}" * 80_000), copies=6, cheap=False),
    Attack(
        "an expression of 235 kB",
        lambda: chat(guided_regex="".join(f"(x{i}|y{i})?" for i in range(15_000))),
        copies=6,
        cheap=False,
    ),
    Attack("(a{1000}){1000}", lambda: chat(guided_regex="(a{1000}){1000}"), copies=2, cheap=False),
    Attack("a head of 70 kB", lambda: head("GET", "/health", "x: " + "y" * 70_000)),
    Attack("500 pipelined and gone", lambda: head("GET", "/health", close=False) * 500, shape="leave"),
    Attack("a key in the URL", lambda: head("GET", "/v1/models?api_key=secret")),
]

BODIES = [
    Attack("131,072 objects", lambda: post(COMPLETE, b'{"prompt": [' + b"{}," * 131_072 + b"0]}")),
    Attack("lists 2 million deep", lambda: post(CHAT, b'{"messages": ' + b"[" * 2_000_000)),
    Attack("objects 500,000 deep", lambda: post(CHAT, b'{"a":' * 500_000)),
    Attack("a key of 4 MB", lambda: post(CHAT, b'{"' + b"k" * 4_000_000 + b'": 1}')),
    Attack("200,000 keys", lambda: chat(**{f"k{i}": 1 for i in range(200_000)})),
    Attack("one key 100,000 times", lambda: post(CHAT, b"{" + b'"a": 1,' * 100_000 + b'"a": 1}')),
    Attack("600,000 escapes", lambda: post(TOKENIZE, b'{"prompt": "' + b"\\u00e9" * 600_000 + b'"}'), cheap=False),
    Attack("half a pair, after 4 MB", lambda: post(TOKENIZE, b'{"prompt": "' + b"a" * 4_000_000 + b'\\ud800"}')),
    Attack("a number of 4 MB", lambda: post(CHAT, b'{"n": ' + b"9" * 4_000_000 + b"}")),
    Attack("a fraction of 4 MB", lambda: post(CHAT, b'{"temperature": 0.' + b"1" * 4_000_000 + b"}")),
    Attack("4 MB of blanks", lambda: post(CHAT, b" " * 4_000_000 + b"{}")),
    Attack("4 MB of quotes", lambda: post(CHAT, b'"' * 4_000_000)),
    Attack("4 MB of backslashes", lambda: post(CHAT, b'"' + b"\\" * 4_000_000)),
    Attack("4 MB of no UTF-8", lambda: post(CHAT, b"\xff" * 4_000_000)),
    Attack("a body over the limit", lambda: post(CHAT, b" " * (4 * MIB + 1))),
    Attack("a body of 40 MB", lambda: post(CHAT, b" " * (40 * MIB)), cheap=False),
    Attack("eight bodies of 4 MB", lambda: post(TOKENIZE, b'{"prompt": "' + b"a " * 2_000_000 + b'"}'), 8, cheap=False),
    Attack("10,000 chunks of a byte", lambda: chunked(b'{"prompt": "', *[b"a"] * 10_000, b'"}')),
    Attack("a chunk that lies", lambda: chunked(b"{}")[:-9] + b"fffffffff\r\n{}"),
    Attack("compressed, so it says", lambda: post(CHAT, b"\x1f\x8b\x08\0\0", "content-encoding: gzip")),
]

FIELDS = [
    Attack("200,000 biases", lambda: complete(logit_bias={str(i): 1 for i in range(200_000)})),
    Attack("200,000 biases that are none", lambda: complete(logit_bias={str(i): "x" for i in range(200_000)})),
    Attack("biases of no token", lambda: complete(logit_bias={"9" * 30: 1, "-1": 1})),
    Attack("131,072 allowed ids", lambda: complete(allowed_token_ids=list(range(131_072)))),
    Attack("131,072 ids that are none", lambda: complete(allowed_token_ids=["x"] * 131_072)),
    Attack("64 stop strings of 256", lambda: complete(stop=["a" * (255 - i) + "b" * (i + 1) for i in range(64)])),
    Attack("256 bad words of 256", lambda: complete(bad_words=[f"{i} " * 60 for i in range(256)])),
    Attack("128 choices", lambda: complete(n=128, temperature=1.0)),
    Attack("32 choices with logprobs", lambda: complete(n=32, temperature=1.0, logprobs=20), cheap=False),
    Attack(
        "the most that integers hold",
        lambda: complete(
            max_tokens=MOST - 1, top_k=MOST - 1, seed=-MOST, priority=-MOST, truncate_prompt_tokens=MOST - 1
        ),
    ),
    Attack("more than integers hold", lambda: complete(max_tokens=MOST, seed=MOST)),
    Attack("the least tokens beyond all", lambda: complete(min_tokens=MOST - 1)),
    Attack("as hot as can be", lambda: complete(temperature=1e308, top_p=1e-300, repetition_penalty=1e308)),
    Attack("as cold as can be", lambda: complete(temperature=5e-324, repetition_penalty=5e-324, typical_p=5e-324)),
    Attack("the end of 4 MB", lambda: complete(prompt="a b " * 900_000, truncate_prompt_tokens=8), cheap=False),
    Attack("200,000 token ids", lambda: complete(prompt=[1] * 200_000)),
    Attack("ids of no token", lambda: complete(prompt=[(1 << 31) - 1])),
    Attack("tokenize 4 MB", lambda: post(TOKENIZE, json.dumps({"prompt": "a b " * 900_000}).encode()), cheap=False),
    Attack("detokenize 260,000", lambda: post(DETOKENIZE, json.dumps({"tokens": [65] * 260_000}).encode())),
    Attack("detokenize what is none", lambda: post(DETOKENIZE, json.dumps({"tokens": [(1 << 31) - 1] * 9}).encode())),
    Attack("a model's name of 3 MB", lambda: chat(model="m" * 3_000_000)),
    Attack("4,000 messages", lambda: chat(messages=[said(content=["x"] * 4)] * 4000), cheap=False),
    Attack("messages with 200 extras each", lambda: chat(messages=[said(**{f"e{i}": 1 for i in range(200)})] * 1000)),
    Attack(
        "variables 100 deep",
        lambda: post(CHAT, b'{"messages": "x", "chat_template_kwargs": {"a": ' + b"[" * 100 + b"]" * 100 + b"}}"),
    ),
    Attack("a variable that is the messages", lambda: chat(chat_template_kwargs={"messages": [], "self": 1})),
    Attack(
        "arguments 120 deep",
        lambda: chat(
            messages=[said("assistant", tool_calls=[{"function": {"name": "f", "arguments": "[" * 100_000}}])]
        ),
    ),
    Attack("128 tools, one required", lambda: chat(tools=[TOOL] * 128, tool_choice="required"), cheap=False),
    Attack(
        "a tool's name of many lines",
        lambda: chat(
            tools=[{"type": "function", "function": {"name": '"\n%json {}', "parameters": {}}}], tool_choice="required"
        ),
    ),
]

GRAMMARS = [
    Attack("4,096 choices of text", lambda: chat(guided_choice=[f"{i}" * 8 for i in range(4096)]), cheap=False),
    Attack("400 enums", lambda: chat(guided_json=SCHEMA), cheap=False),
    Attack("a schema from elsewhere", lambda: chat(guided_json={"$ref": "http://127.0.0.1:1/schema.json"})),
    Attack("a schema of itself", lambda: chat(guided_json={"$ref": "#"})),
    Attack("a schema that is none", lambda: chat(guided_json={"type": 5, "properties": []})),
    Attack("a text of a billion", lambda: chat(guided_json={"type": "string", "minLength": 10**9})),
    Attack("a list of a billion", lambda: chat(guided_json={
        "type": "array", "minItems": 10**9, "items": {"type": "string", "minLength": 10**9}})),
    Attack("a pattern that doubles", lambda: chat(guided_json={"type": "string", "pattern": "^(a|a)*(a|a)*(a|a)*$"})),
    Attack("counted twice", lambda: chat(guided_regex="((\\p{L}{1,500}){1,500}){1,500}"), cheap=False),
    Attack("nested repeats", lambda: chat(guided_regex="(x+x+)+y" * 50)),
    Attack("behind itself", lambda: chat(guided_regex="(?<=a)b\\1")),
    Attack("never any", lambda: chat(guided_regex="[^\\s\\S]")),
    Attack("a rule of itself", lambda: chat(guided_grammar="start: start")),
    Attack("left of itself", lambda: chat(guided_grammar='start: start "a" | start start | "a"')),
    Attack("no grammar", lambda: chat(guided_grammar="\x00" * 1000)),
    Attack("a file's name", lambda: chat(guided_grammar="%import /etc/passwd")),
]  # fmt: skip

HEADS = [
    Attack("1,000 headers", lambda: head("GET", "/health", *(f"h{i}: v" for i in range(1000)))),
    Attack("a path of 60 kB", lambda: head("GET", "/v1/models/" + "m" * 60_000)),
    Attack("a path of no characters", lambda: head("GET", "/v1/models/%ff%00%0d%0ax:y")),
    Attack("a key of 60 kB", lambda: head("GET", "/v1/models", "authorization: Bearer " + "k" * 60_000)),
    Attack("two lengths", lambda: head("POST", CHAT, "content-length: 2", "content-length: 3") + b"{}}"),
    Attack("a length and chunks", lambda: head("POST", CHAT, "content-length: 4", "transfer-encoding: chunked") + b"0"),
    Attack("a length below nothing", lambda: head("POST", CHAT, "content-length: -1")),
    Attack("a length beyond all", lambda: head("POST", CHAT, "content-length: " + "9" * 19)),
    Attack("a length in other digits", lambda: head("POST", CHAT, "content-length: \xb2")),
    Attack("another protocol", lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 400 + b"\r\n\r\n"),
    Attack("HTTP/2", lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    Attack("an upgrade", lambda: head("GET", "/health", "upgrade: websocket", "sec-websocket-key: x")),
    Attack("a method of its own", lambda: head("BREW", "/coffee")),
    Attack("asked to expect", lambda: head("POST", CHAT, "expect: 100-continue", "content-length: 0")),
    Attack("an odd accept", lambda: head("GET", "/metrics", "accept: application/openmetrics-text;version=;;q=x")),
]

CONNECTIONS = [
    Attack("100 slow heads", lambda: head("GET", "/health", "x: " + "y" * 100), 100, "slow", cheap=False),
    Attack("50 slow bodies", chat, 50, "slow", cheap=False),
    Attack("300 connections", lambda: b"", 300, "slow", cheap=False),
    Attack("60 streams and gone", lambda: complete(stream=True, max_tokens=1000), 60, "leave", cheap=False),
    Attack("20 that do not read", lambda: post(
        DETOKENIZE, json.dumps({"tokens": [65] * 260_000}).encode()), 20, "deaf", cheap=False),
    Attack("50 times the metrics", lambda: head("GET", "/metrics"), 50, cheap=False),
    Attack("50 times the document", lambda: head("GET", "/openapi.json"), 50, cheap=False),
    Attack("100 requests at once", complete, 100, cheap=False),
]  # fmt: skip

ATTACKS = (*REPORTED, *BODIES, *FIELDS, *GRAMMARS, *HEADS, *CONNECTIONS)
