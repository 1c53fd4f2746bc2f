"""One turn of a conversation, for every API that has conversations: tool use, generation, and reading the answer."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from llmc.errors import InputError
from llmc.runtime.engine.sampling.params import StructuredOutputsParams
from llmc.runtime.text.answer_parser import AnswerParser, AnswerPart, CallArguments, CallStart, Content, Reasoning
from llmc.runtime.text.call_grammar import answer_grammar, call_grammar
from llmc.runtime.text.chat_format import ChatFormat
from llmc.server.errors import bad_request
from llmc.server.generation import Generation, check_room
from llmc.server.prompts import fitting, render
from llmc.server.protocol.answers import typed_event
from llmc.server.protocol.requests import AllowedTools, NamedTool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastapi import Request

    from llmc.server.protocol.requests import ChatRequest, Tool
    from llmc.server.state import Served, ServerConfig


def read_more(
    parser: AnswerParser, text: str, finish_reason: str | None, stop_reason: str | int | None
) -> list[AnswerPart]:  # fmt: skip
    """Return the parts of more text. A finish reason ends it; a stop string cuts it, as the limit of tokens does."""
    parts = parser.feed(text)
    if finish_reason is not None:
        parts += parser.flush(cut=finish_reason != "stop" or isinstance(stop_reason, str))
    return parts


@dataclass
class Block:
    """A part of an answer in its order: text, reasoning, or a call with its JSON arguments as text."""

    index: int
    kind: Literal["text", "reasoning", "call"]
    name: str = ""
    text: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:24])


@dataclass(frozen=True)
class BlockEvent:
    """A block begins, grows by `text`, or ends."""

    what: Literal["begin", "add", "end"]
    block: Block
    text: str = ""


class Blocks:
    """The blocks of one answer, as its text arrives."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self.blocks: list[Block] = []
        self.finish_reason = ""
        self.stop_reason: str | int | None = None
        self._open: Block | None = None

    def feed(self, text: str, finish_reason: str | None, stop_reason: str | int | None) -> Iterator[BlockEvent]:
        """Add text and yield what it changes. A finish reason ends the answer."""
        for part in read_more(self._parser, text, finish_reason, stop_reason):
            yield from self._taken(part)
        if finish_reason is not None:
            self.finish_reason, self.stop_reason = finish_reason, stop_reason
            if self._open is not None:
                yield BlockEvent("end", self._open)
                self._open = None

    @property
    def calls(self) -> bool:
        """Whether the answer has called a function."""
        return any(block.kind == "call" for block in self.blocks)

    def _taken(self, part: AnswerPart) -> Iterator[BlockEvent]:
        kind: Literal["text", "reasoning", "call"] = "reasoning" if isinstance(part, Reasoning) else "text"
        if isinstance(part, CallStart | CallArguments):
            kind = "call"
        if self._open is None or self._open.kind != kind or isinstance(part, CallStart):
            if self._open is not None:
                yield BlockEvent("end", self._open)
            name = part.name if isinstance(part, CallStart) else ""
            self._open = Block(len(self.blocks), kind, name)
            self.blocks.append(self._open)
            yield BlockEvent("begin", self._open)
        if not isinstance(part, CallStart):
            self._open.text += part.text
            yield BlockEvent("add", self._open, part.text)


async def whole_blocks(generation: Generation, parser: AnswerParser) -> Blocks:
    """Return the blocks of the whole answer."""
    (one,) = await generation.answers()
    blocks = Blocks(parser)
    for _ in blocks.feed(one.text, one.finish_reason, one.stop_reason):
        pass
    return blocks


async def block_events(
    generation: Generation, blocks: Blocks, events: Callable[[BlockEvent], Iterator[dict[str, Any]]]
) -> AsyncGenerator[bytes, None]:
    """Yield the `events` of what happens to the blocks; those that are ready together are joined."""
    async with aclosing(generation.updates()) as news:
        async for updates in news:
            found: list[bytes] = []
            for _, update in updates:
                for event in blocks.feed(update.text, update.finish_reason, update.stop_reason):
                    found += map(typed_event, events(event))
            yield b"".join(found)


@dataclass(frozen=True)
class ToolUse:
    """The `tools` that the template shows, schemas of callable ones (None: calls are not found), and the most calls.

    If `forced`, one of the `offered` functions must be called.
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


@dataclass(frozen=True)
class Turn:
    """`start` begins the generation, `read` returns a new parser of a choice's text; `plain`: all of it is content."""

    start: Coroutine[Any, Any, Generation]
    read: Callable[[], AnswerParser]
    plain: bool


async def prepare(
    request: Request, served: Served, config: ServerConfig, body: ChatRequest, answer_id: str
) -> Turn:  # fmt: skip
    """Render the conversation and decide how the answer is sampled and read. Raises InputError and ApiError."""
    use = tool_use(served, body)
    recommended = config.recommended(served)
    params = body.params().filled(recommended)
    check_room(served, config, 1, params)
    prompts, text = await conversation(request, served, body, use.tools)
    form = served.chat_format or ChatFormat()
    thinking = form.begins_thinking(text)
    constraint = use.constraint(served, thinking, params.structured_outputs)
    more: dict[str, Any] = {} if constraint is params.structured_outputs else {"structured_outputs": constraint}
    plain = form.thinking is None and use.functions is None and not form.in_channels
    if not plain:
        more["kept_special_ids"] = served.mark_ids
    if more:
        params = body.params(**more).filled(recommended)
    start = Generation.start(
        served, answer_id, prompts, params, body.priority, served.adapter(body.model), request.headers
    )  # fmt: skip
    return Turn(start, lambda: AnswerParser(form, use.functions, thinking, use.limit), plain)


async def conversation(
    request: Request, served: Served, body: ChatRequest, tools: Any
) -> tuple[list[list[int]], str]:  # fmt: skip
    """Return the token ids of the rendered conversation, as the only prompt, and its text."""
    text = await render(
        request, served, body.messages, tools, body.add_generation_prompt, body.continue_final_message, body.variables
    )
    keep = body.truncate_prompt_tokens
    return await fitting(request, served, [text], bool(body.add_special_tokens), keep, "messages"), text
