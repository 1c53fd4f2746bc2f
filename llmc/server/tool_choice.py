"""The tools of a chat request: those that the model sees, and the calls that it must write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmc.runtime.engine.sampling.params import StructuredOutputsParams
from llmc.server.errors import bad_request
from llmc.server.tool_calls import OPEN, call_grammar

if TYPE_CHECKING:
    from llmc.server.protocol.chat import ChatRequest, Tool
    from llmc.server.state import Served


@dataclass(frozen=True)
class ToolUse:
    """The `tools` that the template shows, whether calls are looked for, how many at most, and what is forced."""

    tools: list[Tool] | None = None
    finds_calls: bool = False
    limit: int | None = None
    structured: StructuredOutputsParams | None = None


def tool_use(served: Served, body: ChatRequest) -> ToolUse:
    """Raises ApiError for a choice without tools, of an unknown function, or that cannot be enforced for this model."""
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
            f"tool_choice can be auto or none here: the template has no {OPEN}, by which calls could be forced",
            "tool_choice",
        )
    if body.structured() is not None:
        raise bad_request("tool_choice already says what the text must be; leave out the other format", "tool_choice")
    functions: list[dict[str, Any]] = [tool.function.model_dump() for tool in tools]
    if not isinstance(choice, str | None):
        functions = [f for f in functions if f["name"] == choice.function.name]
        if not functions:
            raise bad_request(f"tool_choice names {choice.function.name[:80]!r}, which tools lack", "tool_choice")
    return ToolUse(tools, True, limit, StructuredOutputsParams(grammar=call_grammar(functions, limit is None)))


def writes_hermes(served: Served) -> bool:
    """Whether the template has its model write calls as tool_calls.py reads them, in tokens that are text."""
    if served.chat_template is None or OPEN not in served.chat_template.source:
        return False
    return served.tokenizer.token_to_id(OPEN) not in served.tokenizer.special_ids
