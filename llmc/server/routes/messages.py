"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API over the same engine path as chats."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from llmc.errors import LlmcError
from llmc.server.access import serving, state_of
from llmc.server.answer_blocks import block_events, whole_blocks
from llmc.server.answering import answer
from llmc.server.body import read_body
from llmc.server.errors import api_error
from llmc.server.openapi import reads, streams
from llmc.server.protocol.answers import GENERATING
from llmc.server.protocol.blocks import Blocks
from llmc.server.protocol.chunks import typed_event
from llmc.server.protocol.messages import CountRequest, MessagesError, MessagesRequest, ended, events, message_object
from llmc.server.tool_calls import tool_use
from llmc.server.turns import conversation, prepare

if TYPE_CHECKING:
    from llmc.runtime.text.answer_parser import AnswerParser
    from llmc.server.generation import Generation

router = APIRouter()
_REFUSALS = {status: {"description": described["description"]} for status, described in GENERATING.items()}
"""This API's errors have another form, but for those that come before a route."""


@contextmanager
def _errors() -> Iterator[None]:
    """Errors in this API's form."""
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
