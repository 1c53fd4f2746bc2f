"""Tool calls in the Hermes format, which many templates use: <tool_call>{"name": …, "arguments": {…}}</tool_call>.

`ToolCallParser` finds them in streamed text, `call_grammar` constrains a model to them, and `tool_use` says which of
these a chat request needs. Templates with another notation still show tools to their models, but their calls stay text.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmc.runtime.engine.sampling.params import StructuredOutputsParams
from llmc.server.errors import bad_request

if TYPE_CHECKING:
    from llmc.server.protocol.chat import ChatRequest, Tool
    from llmc.server.state import Served

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_WHITE_SPACE = {"x-guidance": {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}}
"""Bounded, because a weak model may spend all its tokens on white space."""


@dataclass(frozen=True)
class ToolCall:
    """A complete call; `arguments` is JSON text of an object."""

    id: str
    name: str
    arguments: str

    def to_dict(self) -> dict[str, Any]:
        """Return the call in OpenAI's format."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolCallParser:
    """Splits streamed text into calls and other text, in order; results do not depend on chunk boundaries.

    Text without calls is unchanged. White space before calls and at the end is dropped. A malformed call is text. Calls
    beyond `limit` are dropped.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.calls = 0
        self._limit = limit
        self._pending = ""
        self._searched = 0
        self._space = ""
        self._inside = False

    def feed(self, text: str) -> list[str | ToolCall]:
        """Return the parts that are now certain."""
        self._pending += text
        return list(self._found())

    def flush(self) -> list[str | ToolCall]:
        """Return the rest; call once, at the end. The last call may lack its closing tag."""
        rest, self._pending = self._pending, ""
        if self._inside:
            call = _read(rest)
            found: list[str | ToolCall] = [OPEN + rest] if call is None else list(self._call(call))
        else:
            found = list(self._text(rest))
        return found if self.calls or not self._space else [*found, self._space]

    def _found(self) -> Iterator[str | ToolCall]:
        while True:
            tag = CLOSE if self._inside else OPEN
            index = self._pending.find(tag, self._searched)
            if index < 0:
                break
            before, after = self._pending[:index], self._pending[index + len(tag) :]
            if not self._inside:
                yield from self._text(before)
                self._inside = True
            else:
                call = _read(before)
                if call is None and _in_string(before):  # the tag is inside a string of the call
                    self._searched = index + len(tag)
                    continue
                yield from self._text(OPEN + before + CLOSE) if call is None else self._call(call)
                self._inside = False
            self._pending, self._searched = after, 0
        self._searched = max(self._searched, len(self._pending) - len(tag) + 1)
        if not self._inside:
            held = next((n for n in range(len(OPEN) - 1, 0, -1) if self._pending.endswith(OPEN[:n])), 0)
            certain = self._pending[: len(self._pending) - held]
            self._pending, self._searched = self._pending[len(certain) :], 0
            yield from self._text(certain)

    def _text(self, text: str) -> Iterator[str]:
        """Yield text up to its last white space, which is held back until more text follows."""
        kept = text.rstrip()
        if kept:
            yield self._space + kept
            self._space = text[len(kept) :]
        else:
            self._space += text

    def _call(self, call: tuple[str, str]) -> Iterator[ToolCall]:
        self._space = ""
        if self._limit is None or self.calls < self._limit:
            self.calls += 1
            yield ToolCall(f"call_{uuid.uuid4().hex[:24]}", *call)


def _read(text: str) -> tuple[str, str] | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return call["name"], json.dumps(arguments, ensure_ascii=False)


def _in_string(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError as e:
        return e.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        return False
    return False


def call_grammar(functions: Sequence[Mapping[str, Any]], several: bool) -> str:
    """Build a Lark grammar of calls of `functions` ({"name", "parameters": JSON schema}): one, or if `several` one or
    more.
    """
    rules = ['start: call ("\\n" call)*' if several else "start: call"]
    rules.append("call: " + " | ".join(f"call{i}" for i in range(len(functions))))
    for i, function in enumerate(functions):
        name = json.dumps(function["name"])
        head = json.dumps(f'{OPEN}\n{{"name": {name}, "arguments": ')
        schema = json.dumps({**(function.get("parameters") or {"type": "object"}), **_WHITE_SPACE})
        rules += [f"call{i}: {head} arguments{i} {json.dumps('}' + chr(10) + CLOSE)}", f"arguments{i}: %json {schema}"]
    return "\n".join(rules) + "\n"


@dataclass(frozen=True)
class ToolUse:
    """The `tools` shown to the template, whether to find calls, their maximum number, and the forced format."""

    tools: list[Tool] | None = None
    finds_calls: bool = False
    limit: int | None = None
    structured: StructuredOutputsParams | None = None


def tool_use(served: Served, body: ChatRequest) -> ToolUse:
    """Decide the tool use of a request.

    Raises ApiError for a tool_choice without tools, of an unknown function, or that cannot be enforced for this model.
    """
    choice, tools = body.tool_choice, body.tools or []
    if choice in (None, "auto", "none") and not tools:
        return ToolUse()
    if not tools:
        raise bad_request("tool_choice needs tools", "tool_choice")
    if choice == "none":
        return ToolUse()
    limit = 1 if body.parallel_tool_calls is False or not isinstance(choice, str | None) else None
    hermes = writes_hermes(served)
    if choice in (None, "auto"):
        return ToolUse(tools, hermes, limit)
    if not hermes:
        raise bad_request(
            f"tool_choice can be auto or none here: the template has no {OPEN}, which is needed to force calls",
            "tool_choice",
        )
    if body.structured() is not None:
        raise bad_request("tool_choice already says what the text must be; leave out the other format", "tool_choice")
    functions: list[dict[str, Any]] = [tool.function.model_dump() for tool in tools]
    if not isinstance(choice, str | None):
        functions = [f for f in functions if f["name"] == choice.function.name]
        if not functions:
            raise bad_request(f"tool_choice names {choice.function.name[:80]!r}, which is not in tools", "tool_choice")
    return ToolUse(tools, True, limit, StructuredOutputsParams(grammar=call_grammar(functions, limit is None)))


def writes_hermes(served: Served) -> bool:
    """Whether the template makes its model write calls in the Hermes format, with tags that are text tokens."""
    if served.chat_template is None or OPEN not in served.chat_template.source:
        return False
    return served.tokenizer.token_to_id(OPEN) not in served.tokenizer.special_ids
