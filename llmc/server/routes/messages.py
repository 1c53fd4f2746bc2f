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
from llmc.server.answering import answer
from llmc.server.body import read_body
from llmc.server.errors import api_error
from llmc.server.openapi import reads, streams
from llmc.server.protocol.answers import GENERATING
from llmc.server.protocol.blocks import Blocks, cut
from llmc.server.protocol.messages import CountRequest, MessagesError, MessagesRequest, ended, events, message_object
from llmc.server.routes.responses import written
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
        (one,) = await generation.answers()
        blocks = Blocks(self.read())
        for _ in blocks.feed(one.text, cut(one.finish_reason, one.stop_reason)):
            pass
        why = ended(one.finish_reason, one.stop_reason, blocks.calls)
        return message_object(self.message_id, self.model, blocks.blocks, why, generation.usage)

    async def stream(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Yield the events of the message; those that are ready together are joined."""
        blocks = Blocks(self.read())
        begun = message_object(self.message_id, self.model, [], None, generation.usage)
        yield written({"type": "message_start", "message": begun})
        why: tuple[str, str | None] = ("end_turn", None)
        async with aclosing(generation.updates()) as news:
            async for updates in news:
                found: list[bytes] = []
                for _, update in updates:
                    how = cut(update.finish_reason, update.stop_reason) if update.finish_reason else None
                    for event in blocks.feed(update.text, how):
                        found += map(written, events(event))
                    if update.finish_reason:
                        why = ended(update.finish_reason, update.stop_reason, blocks.calls)
                yield b"".join(found)
        whole = message_object(self.message_id, self.model, [], why, generation.usage)
        delta = {"stop_reason": why[0], "stop_sequence": why[1]}
        yield written({"type": "message_delta", "delta": delta, "usage": whole["usage"]})
        yield written({"type": "message_stop"})
