"""POST /v1/responses: OpenAI's Responses API over the same engine path as chats.

Nothing is stored: a client sends the whole conversation as `input`.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from llmc.errors import InputError
from llmc.server.errors import ApiError, api_error, bad_request
from llmc.server.generation import answer
from llmc.server.protocol import base
from llmc.server.protocol.answers import GENERATING, typed_event
from llmc.server.protocol.base import AtMost, Body, Name, Object, Refused, Text
from llmc.server.protocol.requests import ChatRequest, Int64, empty
from llmc.server.routes.common import read_body, reads, serving, state_of, streams
from llmc.server.turns import Block, BlockEvent, Blocks, block_events, prepare, whole_blocks

if TYPE_CHECKING:
    from llmc.runtime.text.answer_parser import AnswerParser
    from llmc.server.generation import Generation


_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}
_PASSED = ("model", "temperature", "top_p", "top_k", "seed", "stream", "parallel_tool_calls", "chat_template_kwargs")
_SHOWN = ("instructions", "max_output_tokens", "temperature", "top_p", "metadata", "user")

NAMES = {"messages": "input", "response_format": "text.format"}
"""This API's names of a chat request's fields."""


class ResponsesRequest(Body):
    """Create a response."""

    model: Name | None = None
    input: Text | Annotated[list[Object], AtMost(base.MAX_MESSAGES, least=1)]
    instructions: Text | None = None
    max_output_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    seed: Int64 | None = None
    stream: bool | None = None
    tools: Annotated[list[Object], AtMost(base.MAX_TOOLS)] | None = None
    tool_choice: Name | Object | None = None
    parallel_tool_calls: bool | None = None
    text: Object | None = None
    reasoning: Object | None = None
    metadata: Object | None = None
    user: Name | None = None
    store: bool | None = None
    chat_template_kwargs: Object | None = None

    refused: ClassVar[Refused] = {
        "previous_response_id": (empty, "this server stores no responses; send the whole conversation in input"),
        "conversation": (empty, "this server stores no conversations; send the whole conversation in input"),
        "background": (empty, "this server stores no responses"),
        "prompt": (empty, "this server has no stored prompts; use instructions and input"),
    }

    def chat(self) -> ChatRequest:
        """Return the same request for /v1/chat/completions. Raises ApiError that names this request's field."""
        given = {name: value for name in _PASSED if (value := getattr(self, name)) is not None}
        effort = (self.reasoning or {}).get("effort")
        try:
            return ChatRequest.parse({
                **given,
                "messages": list(_messages(self.instructions, self.input)),
                **({} if self.max_output_tokens is None else {"max_completion_tokens": self.max_output_tokens}),
                **({} if effort is None else {"reasoning_effort": effort}),
                **({} if self.tools is None else {"tools": [_tool(i, tool) for i, tool in enumerate(self.tools)]}),
                **({} if self.tool_choice is None else {"tool_choice": _choice(self.tool_choice)}),
                **_format((self.text or {}).get("format")),
            })  # fmt: skip
        except ApiError as error:
            raise renamed(error, NAMES) from None


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Return an error of a chat request with another API's names of the fields, without the index of a message."""
    message, param = str(error), error.param or ""
    for name, other in names.items():
        at = re.compile(rf"^{name}(\[\d+\])?")
        message, param = at.sub(other, message), at.sub(other, param)
    return ApiError(error.status, message, kind=error.kind, param=param or None, code=error.code, headers=error.headers)


def _messages(instructions: str | None, given: str | list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    if instructions:
        yield {"role": "system", "content": instructions}
    if isinstance(given, str):
        yield {"role": "user", "content": given}
        return
    calls: dict[str, Any] | None = None
    reasoning = ""
    for index, item in enumerate(given):
        kind = item.get("type", "message" if "role" in item else None)
        if calls is not None and kind != "function_call":
            yield calls
            calls = None
        if kind == "message":
            thought = {"reasoning_content": reasoning} if reasoning and item.get("role") == "assistant" else {}
            yield {"role": item.get("role"), "content": _content(item.get("content")), **thought}
            reasoning = ""
        elif kind == "reasoning":
            reasoning = _text_of(item.get("content") or item.get("summary") or [], index)
        elif kind == "function_call":
            calls = calls or {
                "role": "assistant", "content": None, "tool_calls": [],
                **({"reasoning_content": reasoning} if reasoning else {}),
            }  # fmt: skip
            reasoning = ""
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            calls["tool_calls"].append({"id": item.get("call_id"), "type": "function", "function": function})
        elif kind == "function_call_output":
            output = item.get("output")
            content = output if isinstance(output, str) else _text_of(output, index)
            yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
        else:
            raise bad_request(f"input[{index}].type {kind!r:.80} is not supported", f"input[{index}].type")
    if calls is not None:
        yield calls


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [part if (text := _text_in(part)) is None else {"type": "text", "text": text} for part in content]


def _text_of(parts: Any, index: int) -> str:
    given = parts if isinstance(parts, list) else [parts]
    texts = [text for part in given if (text := _text_in(part)) is not None]
    if len(texts) < len(given):
        raise bad_request(f"input[{index}] has a part that is no text; this model takes text only", f"input[{index}]")
    return "\n".join(texts)


def _text_in(part: Any) -> str | None:
    text = part.get("text") if isinstance(part, dict) and part.get("type") in _TEXTS else None
    return text if isinstance(text, str) else None


def _tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        where = f"tools[{index}].type"
        raise bad_request(f"{where} {tool.get('type')!r:.80} is not supported; use tools of type function", where)
    known = {name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": known}


def _choice(choice: str | Mapping[str, Any]) -> Any:
    if isinstance(choice, str):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        allowed = [_choice(tool) if isinstance(tool, Mapping) else tool for tool in choice["tools"]]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": allowed}}
    raise bad_request(f"tool_choice of type {choice.get('type')!r:.80} is not supported", "tool_choice")


def _format(wanted: Any) -> dict[str, Any]:
    if not isinstance(wanted, dict) or wanted.get("type") == "text":
        return {}
    if wanted.get("type") == "json_schema":
        named = {name: wanted[name] for name in ("name", "schema", "strict") if wanted.get(name) is not None}
        return {"response_format": {"type": "json_schema", "json_schema": named}}
    return {"response_format": wanted}


@dataclass
class ResponseObject:
    """Writes a response and the events of its stream; `sequence` numbers the events."""

    id: str
    model: str
    body: ResponsesRequest
    created: int = field(default_factory=lambda: int(time.time()))
    sequence: int = 0

    def whole(
        self, status: str, output: list[dict[str, Any]], usage: Mapping[str, Any] | None = None,
        incomplete: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the response; `usage` is that of a chat completion, `incomplete` why it ended early."""
        body = self.body
        counted = None if usage is None else {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }  # fmt: skip
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "error": None,
            "incomplete_details": None if incomplete is None else {"reason": incomplete}, "model": self.model,
            "output": output, "usage": counted, "previous_response_id": None, "store": False, "truncation": "disabled",
            "parallel_tool_calls": body.parallel_tool_calls is not False, "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [], "text": body.text or {"format": {"type": "text"}},
            "reasoning": body.reasoning or {"effort": None, "summary": None},
            **{name: getattr(body, name) for name in _SHOWN},
        }  # fmt: skip

    def event(self, kind: str, **members: Any) -> dict[str, Any]:
        """Return an event of the stream."""
        self.sequence += 1
        return {"type": kind, "sequence_number": self.sequence - 1, **members}

    def events(self, event: BlockEvent) -> Iterator[dict[str, Any]]:
        """Yield the stream's events for what happens to a block."""
        block = event.block
        item = {"item_id": _item_id(block), "output_index": block.index}
        within = {**item, "content_index": 0}
        names = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
        name, own = f"response.{names[block.kind]}", item if block.kind == "call" else within
        logged: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if event.what == "begin":
            added = {**output_item(block, "in_progress"), **({} if block.kind == "call" else {"content": []})}
            yield self.event("response.output_item.added", output_index=block.index, item=added)
            if block.kind == "text":
                yield self.event("response.content_part.added", **within, part=_part(block))
        elif event.what == "add":
            yield self.event(f"{name}.delta", **own, delta=event.text, **logged)
        else:
            whole = {"arguments": block.text} if block.kind == "call" else {"text": block.text}
            yield self.event(f"{name}.done", **own, **whole, **logged)
            if block.kind == "text":
                yield self.event("response.content_part.done", **within, part=_part(block))
            done = output_item(block, "completed")
            yield self.event("response.output_item.done", output_index=block.index, item=done)


def output_item(block: Block, status: str) -> dict[str, Any]:
    """Return a block as an item of a response's output."""
    common = {"id": _item_id(block), "status": status}
    if block.kind == "call":
        call = {"call_id": f"call_{block.id}", "name": block.name, "arguments": block.text}
        return {**common, "type": "function_call", **call}
    if block.kind == "reasoning":
        return {**common, "type": "reasoning", "summary": [], "content": [_part(block)]}
    return {**common, "type": "message", "role": "assistant", "content": [_part(block)]}


def _item_id(block: Block) -> str:
    return f"{_PREFIXES[block.kind]}{block.id}"


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


router = APIRouter()


@router.post(
    "/v1/responses", response_model=None,
    responses={200: streams("The response; with stream, its events."), **GENERATING},
    openapi_extra=reads(ResponsesRequest),
)  # fmt: skip
async def responses(request: Request) -> Response:
    """Create a response."""
    body = await read_body(request, ResponsesRequest)
    served, config = serving(request, body.model), state_of(request).config
    answer_id = f"resp_{uuid.uuid4().hex}"
    try:
        chat = body.chat()
        turn = await prepare(request, served, config, chat, answer_id)
        writer = ResponsesWriter(ResponseObject(answer_id, body.model or served.model_name, body), turn.read)
        return await answer(request, turn.start, writer, body.stream)
    except InputError as e:
        raise renamed(api_error(e, ResponsesRequest.model_fields), NAMES) from e
    except ApiError as e:
        raise renamed(e, NAMES) from e


@dataclass(frozen=True)
class ResponsesWriter:
    """Writes one response; `read` returns the parser of its text."""

    response: ResponseObject
    read: Callable[[], AnswerParser]

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """Return the whole response."""
        return self._ended(await whole_blocks(generation, self.read()), generation.usage)

    async def stream(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Yield the events of the response; those that are ready together are joined."""
        response, blocks = self.response, Blocks(self.read())
        begun = response.whole("in_progress", [])
        yield typed_event(response.event("response.created", response=begun))
        yield typed_event(response.event("response.in_progress", response=begun))
        async with aclosing(block_events(generation, blocks, response.events)) as news:
            async for some in news:
                yield some
        whole = self._ended(blocks, generation.usage)
        yield typed_event(response.event(f"response.{whole['status']}", response=whole))

    def _ended(self, blocks: Blocks, usage: dict[str, Any]) -> dict[str, Any]:
        status = {"length": "incomplete", "error": "failed"}.get(blocks.finish_reason, "completed")
        output = [output_item(block, "completed") for block in blocks.blocks]
        if output and status != "completed":
            output[-1]["status"] = "incomplete"
        why = "max_output_tokens" if status == "incomplete" else None
        return self.response.whole(status, output, usage, why)
