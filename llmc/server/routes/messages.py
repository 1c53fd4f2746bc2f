"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API over the same engine path as chats."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from llmc.errors import LlmcError
from llmc.server.errors import ApiError, api_error, bad_request
from llmc.server.generation import answer
from llmc.server.protocol import base
from llmc.server.protocol.answers import GENERATING, typed_event
from llmc.server.protocol.base import AtMost, Body, BodyPart, Name, Object, Refused, Text
from llmc.server.protocol.requests import ChatRequest, Int64, Texts, empty
from llmc.server.routes.common import read_body, reads, serving, state_of, streams
from llmc.server.routes.responses import renamed
from llmc.server.turns import Block, BlockEvent, Blocks, block_events, conversation, prepare, tool_use, whole_blocks

if TYPE_CHECKING:
    from llmc.runtime.text.answer_parser import AnswerParser
    from llmc.server.generation import Generation


Parts = Annotated[list[Object], AtMost(base.MAX_PARTS)]
_PASSED = ("model", "temperature", "top_p", "top_k", "stream")
_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
_STOPS = {"length": "max_tokens", "error": "refusal"}


class TurnMessage(BodyPart):
    """A message of the user or the assistant: text, or blocks of text, thinking, tool_use and tool_result."""

    role: Literal["user", "assistant"]
    content: Text | Parts


class Thinking(BodyPart):
    """Whether the model is to reason, for chat templates with the variable enable_thinking."""

    type: Literal["enabled", "disabled", "adaptive"]


class ToolChoice(BodyPart):
    """Which tool is to be called: any, one by its name, none, or as the model decides."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class InputTool(BodyPart):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: Annotated[str, AtMost(base.MAX_NAME, least=1)]
    description: Text | None = None
    input_schema: Object | None = None


class CountRequest(Body):
    """Count the tokens of a conversation."""

    model: Name | None = None
    messages: Annotated[list[TurnMessage], AtMost(base.MAX_MESSAGES, least=1)]
    system: Text | Parts | None = None
    tools: Annotated[list[InputTool], AtMost(base.MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None

    def chat(self) -> ChatRequest:
        """Return the same request for /v1/chat/completions. Raises ApiError that names this request's field."""
        try:
            return ChatRequest.parse(self._chat())
        except ApiError as error:
            raise renamed(error, NAMES) from None

    def _chat(self) -> dict[str, Any]:
        given: dict[str, Any] = {"messages": list(_messages(self.system, self.messages))}
        if self.model is not None:
            given["model"] = self.model
        if self.tools:
            given["tools"] = [_tool(tool) for tool in self.tools]
        if self.tool_choice is not None:
            given["tool_choice"] = _choice(self.tool_choice)
            if self.tool_choice.disable_parallel_tool_use:
                given["parallel_tool_calls"] = False
        if self.thinking is not None and self.thinking.type != "adaptive":
            given["chat_template_kwargs"] = {"enable_thinking": self.thinking.type == "enabled"}
        return given


class MessagesRequest(CountRequest):
    """Create a message."""

    max_tokens: Annotated[Int64, Field(ge=1)]
    stop_sequences: Texts | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None

    refused: ClassVar[Refused] = {
        "mcp_servers": (empty, "this server calls no other server"),
        "container": (empty, "this server runs no containers"),
    }

    def _chat(self) -> dict[str, Any]:
        given = {name: value for name in _PASSED if (value := getattr(self, name)) is not None}
        stop = {} if self.stop_sequences is None else {"stop": self.stop_sequences}
        return {**super()._chat(), **given, **stop, "max_completion_tokens": self.max_tokens}


NAMES = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences"}
"""This API's names of a chat request's fields."""


class MessagesError(ApiError):
    """An error in this API's form."""

    @classmethod
    def of(cls, error: ApiError) -> MessagesError:
        """Return an error of another route in this form."""
        found = renamed(error, NAMES)
        return cls(found.status, str(found), kind=_KINDS.get(found.status, "api_error"), headers=found.headers)

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        return {"type": "error", "error": {"type": self.kind, "message": str(self)}}


def _messages(system: Any, given: list[TurnMessage]) -> Iterator[dict[str, Any]]:
    if system:
        yield {"role": "system", "content": system if isinstance(system, str) else _text(system, "system")}
    for index, message in enumerate(given):
        where = f"messages[{index}].content"
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "assistant":
            yield _assistant(message.content, where)
        else:
            yield from _user(message.content, where)


def _assistant(parts: list[dict[str, Any]], where: str) -> dict[str, Any]:
    texts = [part for part in parts if part.get("type") not in ("tool_use", "thinking", "redacted_thinking")]
    built: dict[str, Any] = {"role": "assistant", "content": _text(texts, where) if texts else None}
    calls = [
        {
            "id": part.get("id"), "type": "function",
            "function": {"name": part.get("name"), "arguments": json.dumps(part.get("input") or {})},
        }
        for part in parts if part.get("type") == "tool_use"
    ]  # fmt: skip
    if calls:
        built["tool_calls"] = calls
    if thought := "".join(str(part.get("thinking", "")) for part in parts if part.get("type") == "thinking"):
        built["reasoning_content"] = thought
    return built


def _user(parts: list[dict[str, Any]], where: str) -> Iterator[dict[str, Any]]:
    """Tool results are messages of their own, before what the user says."""
    said = [part for part in parts if part.get("type") != "tool_result"]
    for part in parts:
        if part.get("type") == "tool_result":
            content = part.get("content") or ""
            result = content if isinstance(content, str) else _text(content, where)
            yield {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": result}
    if said:
        yield {"role": "user", "content": _text(said, where)}


def _text(parts: Any, where: str) -> str:
    given = parts if isinstance(parts, list) else [parts]
    for part in given:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise bad_request(f"{where} has a block of type {kind!r:.80}; this model takes text only", where)
    return "\n".join(part["text"] for part in given)


def _tool(tool: InputTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _choice(choice: ToolChoice) -> Any:
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    if choice.name is None:
        raise bad_request("tool_choice of type tool needs name", "tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def message_object(
    message_id: str, model: str, blocks: list[Block], ended: tuple[str, str | None] | None, usage: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a message; `ended` is why and at which stop sequence, `usage` that of a chat completion."""
    reason, stop = ended or (None, None)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "id": message_id, "type": "message", "role": "assistant", "model": model,
        "content": [_block(block) for block in blocks], "stop_reason": reason, "stop_sequence": stop,
        "usage": {
            "input_tokens": usage["prompt_tokens"] - cached, "output_tokens": usage["completion_tokens"],
            "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached,
        },
    }  # fmt: skip


def ended(finish_reason: str, stop: str | int | None, calls: bool) -> tuple[str, str | None]:
    """Return the stop reason and the stop sequence of an answer."""
    if isinstance(stop, str):
        return "stop_sequence", stop
    return _STOPS.get(finish_reason, "tool_use" if calls else "end_turn"), None


def _block(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    try:
        given = json.loads(block.text)
    except ValueError:  # the call was cut
        given = {}
    return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": given}


def events(event: BlockEvent) -> Iterator[dict[str, Any]]:
    """Yield a stream's events for what happens to a block."""
    block = event.block
    if event.what == "begin":
        begun = _block(Block(block.index, block.kind, block.name, "" if block.kind != "call" else "{}", block.id))
        yield {"type": "content_block_start", "index": block.index, "content_block": begun}
    elif event.what == "add":
        name, member = {
            "text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
            "call": ("input_json_delta", "partial_json"),
        }[block.kind]  # fmt: skip
        yield {"type": "content_block_delta", "index": block.index, "delta": {"type": name, member: event.text}}
    else:
        yield {"type": "content_block_stop", "index": block.index}


router = APIRouter()
_REFUSALS = {status: {"description": described["description"]} for status, described in GENERATING.items()}
"""This API's errors have another form, but for those that come before a route."""


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except LlmcError as error:
        raise MessagesError.of(api_error(error, MessagesRequest.model_fields)) from error


@router.post(
    "/v1/messages", response_model=None,
    responses={200: streams("The message; with stream, its events."), **_REFUSALS},
    openapi_extra=reads(MessagesRequest),
)  # fmt: skip
async def messages(request: Request) -> Response:
    """Create a message."""
    with _errors():
        body = await read_body(request, MessagesRequest)
        served, config = serving(request, body.model), state_of(request).config
        answer_id = f"msg_{uuid.uuid4().hex[:24]}"
        turn = await prepare(request, served, config, body.chat(), answer_id)
        writer = MessagesWriter(answer_id, body.model or served.model_name, turn.read)
        return await answer(request, turn.start, writer, body.stream)


@router.post(
    "/v1/messages/count_tokens", response_model=None,
    responses={200: {"description": "The number of tokens."}, **_REFUSALS}, openapi_extra=reads(CountRequest),
)  # fmt: skip
async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation."""
    with _errors():
        body = await read_body(request, CountRequest)
        served = serving(request, body.model)
        chat = body.chat()
        (ids,), _ = await conversation(request, served, chat, tool_use(served, chat).tools)
        return JSONResponse({"input_tokens": len(ids)})


@dataclass(frozen=True)
class MessagesWriter:
    """Writes one message; `read` returns the parser of its text."""

    message_id: str
    model: str
    read: Callable[[], AnswerParser]

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """Return the whole message."""
        return self._ended(await whole_blocks(generation, self.read()), generation.usage)

    async def stream(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Yield the events of the message; those that are ready together are joined."""
        blocks = Blocks(self.read())
        begun = message_object(self.message_id, self.model, [], None, generation.usage)
        yield typed_event({"type": "message_start", "message": begun})
        async with aclosing(block_events(generation, blocks, events)) as news:
            async for some in news:
                yield some
        whole = self._ended(blocks, generation.usage)
        delta = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield typed_event({"type": "message_delta", "delta": delta, "usage": whole["usage"]})
        yield typed_event({"type": "message_stop"})

    def _ended(self, blocks: Blocks, usage: dict[str, Any]) -> dict[str, Any]:
        why = ended(blocks.finish_reason, blocks.stop_reason, blocks.calls)
        return message_object(self.message_id, self.model, blocks.blocks, why, usage)
