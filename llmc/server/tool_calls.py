"""Tool use of a chat request: which tools its template shows, whether calls are found, and the forced notation."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmc.errors import InputError
from llmc.runtime.engine.sampling.params import StructuredOutputsParams
from llmc.runtime.text.answer_parser import AnswerParser, AnswerPart, CallArguments, CallStart, Content, Reasoning
from llmc.runtime.text.call_grammar import call_grammar
from llmc.server.errors import bad_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmc.server.protocol.chat import ChatRequest, Tool
    from llmc.server.state import Served


@dataclass(frozen=True)
class ToolUse:
    """The `tools` shown to the template, those that may be called (None: calls are not found), and those that must be.

    `limit` is the maximum number of calls.
    """

    tools: list[Tool] | None = None
    functions: Mapping[str, Mapping[str, Any]] | None = None
    limit: int | None = None
    forced: Sequence[Mapping[str, Any]] | None = None

    def constraint(self, served: Served, thinking: bool) -> dict[str, StructuredOutputsParams]:
        """Return the sampling parameter that forces a call, or nothing. Raises ApiError where it cannot be forced."""
        if self.forced is None or served.chat_format is None:
            return {}
        try:
            grammar = call_grammar(
                served.chat_format, self.forced, self.limit is None, served.special_tokens, thinking
            )  # fmt: skip
        except InputError as error:
            raise bad_request(f"tool_choice can be auto or none here: {error}", "tool_choice") from None
        return {"structured_outputs": StructuredOutputsParams(grammar=grammar)}


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
    functions: list[dict[str, Any]] = [tool.function.model_dump() for tool in tools]
    schemas = {function["name"]: function.get("parameters") or {} for function in functions}
    if choice in (None, "auto"):
        return ToolUse(tools, schemas, limit)
    if served.chat_format is None or served.chat_format.calls is None:
        raise bad_request(
            "tool_choice can be auto or none here: this model's chat template has no known notation of tool calls",
            "tool_choice",
        )
    if body.structured() is not None:
        raise bad_request("tool_choice already says what the text must be; leave out the other format", "tool_choice")
    if not isinstance(choice, str | None):
        functions = [f for f in functions if f["name"] == choice.function.name]
        if not functions:
            raise bad_request(f"tool_choice names {choice.function.name[:80]!r}, which is not in tools", "tool_choice")
    return ToolUse(tools, schemas, limit, functions)


@dataclass
class ReadAnswer:
    """One choice's text, read by the format of the model's chat template: content, reasoning and calls."""

    parser: AnswerParser
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def deltas(self, text: str, finish_reason: str | None = None) -> list[dict[str, Any]]:
        """Add text and return the deltas of a stream. `finish_reason` ends the text."""
        parts = self.parser.feed(text)
        if finish_reason is not None:
            parts += self.parser.flush(cut=finish_reason != "stop")
        found: list[dict[str, Any]] = []
        for part in parts:
            delta = self._delta(part)
            started = found[-1].get("tool_calls", [{}])[0] if found else {}
            if isinstance(part, CallArguments) and "id" in started:  # arguments that come with the call's name
                started["function"]["arguments"] += part.text
            else:
                found.append(delta)
        return found

    def message(self) -> dict[str, Any]:
        """Return the whole message; `deltas` has had all text."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.reasoning:
            message |= _reasoning(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        if not self.content and (self.calls or self.reasoning):
            message["content"] = None
        return message

    def reason(self, reason: str) -> str:
        """Return "tool_calls" for a choice that stopped by itself with calls."""
        return "tool_calls" if self.calls and reason == "stop" else reason

    def _delta(self, part: AnswerPart) -> dict[str, Any]:
        match part:
            case Content(text):
                self.content += text
                return {"content": text}
            case Reasoning(text):
                self.reasoning += text
                return _reasoning(text)
            case CallStart(index, name):
                call = {
                    "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function",
                    "function": {"name": name, "arguments": ""},
                }  # fmt: skip
                self.calls.append({**call, "function": {"name": name, "arguments": ""}})
                return {"tool_calls": [{"index": index, **call}]}
            case CallArguments(index, text):
                self.calls[index]["function"]["arguments"] += text
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _reasoning(text: str) -> dict[str, str]:
    """Reasoning under both names that clients read: vLLM's newer one, and DeepSeek's."""
    return {"reasoning_content": text, "reasoning": text}
