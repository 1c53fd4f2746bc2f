"""Tool use of a chat request: which tools its template shows, whether calls are found, and the forced notation."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmc.errors import InputError
from llmc.runtime.engine.sampling.params import StructuredOutputsParams
from llmc.runtime.text.answer_parser import AnswerParser, AnswerPart, CallArguments, CallStart, Content, Reasoning
from llmc.runtime.text.call_grammar import answer_grammar, call_grammar
from llmc.runtime.text.chat_format import ChatFormat
from llmc.server.errors import bad_request
from llmc.server.protocol.blocks import read_more
from llmc.server.protocol.chat import AllowedTools, NamedTool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmc.server.protocol.chat import ChatRequest, Tool
    from llmc.server.state import Served


@dataclass(frozen=True)
class ToolUse:
    """The `tools` shown to the template, the schemas of those that may be called (None: calls are not found), and the
    `offered` functions, one of which must be called if `forced`.

    `limit` is the maximum number of calls.
    """

    tools: list[Tool] | None = None
    functions: Mapping[str, Mapping[str, Any]] | None = None
    limit: int | None = None
    offered: Sequence[Mapping[str, Any]] = ()
    forced: bool = False

    def constraint(
        self, served: Served, thinking: bool, stated: StructuredOutputsParams | None
    ) -> StructuredOutputsParams | None:
        """Return the constraint of the text: calls, an answer of the `stated` form, or either.

        With `thinking`, the prompt has opened a block of reasoning. Raises ApiError where a call cannot be forced.
        """
        form = served.chat_format or ChatFormat()
        answer = None if stated is None or stated.kind == "grammar" else (stated.kind, getattr(stated, stated.kind))
        several, special = self.limit is None, served.special_tokens
        if self.forced:
            try:
                grammar = call_grammar(form, self.offered, several, special, thinking)
            except InputError as error:
                raise bad_request(f"tool_choice can be auto or none here: {error}", "tool_choice") from None
        elif answer is None:
            return stated
        elif self.offered and form.calls is not None:
            try:
                grammar = call_grammar(form, self.offered, several, special, thinking, answer)
            except InputError as error:
                raise bad_request(f"response_format is not possible with these tools: {error}", "tools") from None
        elif thinking or form.in_channels:
            grammar = answer_grammar(form, answer, special, thinking)
        else:
            return stated
        return StructuredOutputsParams(grammar=grammar)


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
    offered: list[dict[str, Any]] = [tool.function.model_dump() for tool in tools]
    chosen = None
    if isinstance(choice, NamedTool):
        chosen = [choice]
    elif isinstance(choice, AllowedTools):
        chosen = choice.allowed_tools.tools
    if chosen is not None:
        names = {tool.function.name for tool in chosen}
        if unknown := names.difference(function["name"] for function in offered):
            raise bad_request(f"tool_choice names {min(unknown)[:80]!r}, which is not in tools", "tool_choice")
        offered = [function for function in offered if function["name"] in names]
        if not offered:
            raise bad_request("tool_choice names no tool", "tool_choice")
    schemas = {function["name"]: function.get("parameters") or {} for function in offered}
    limit = 1 if body.parallel_tool_calls is False or isinstance(choice, NamedTool) else None
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice
    if mode in (None, "auto"):
        return ToolUse(tools, schemas, limit, offered)
    if served.chat_format is None or served.chat_format.calls is None:
        raise bad_request(
            "tool_choice can be auto or none here: this model's chat template has no known notation of tool calls",
            "tool_choice",
        )
    if body.structured() is not None and body.response_format is None:
        raise bad_request("tool_choice already says what the text must be; leave out the other format", "tool_choice")
    return ToolUse(tools, schemas, limit, offered, forced=True)


@dataclass
class ReadAnswer:
    """One choice's text, read by the format of the model's chat template: content, reasoning and calls."""

    parser: AnswerParser
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def deltas(
        self, text: str, finish_reason: str | None, stop_reason: str | int | None
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Add text and return the deltas of a stream. A finish reason ends the text."""
        found: list[dict[str, Any]] = []
        for part in read_more(self.parser, text, finish_reason, stop_reason):
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
