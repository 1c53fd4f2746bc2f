"""POST /v1/responses: OpenAI's Responses API over the same engine path as chats."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from llmc.errors import InputError
from llmc.server.access import serving, state_of
from llmc.server.answer_blocks import block_events, whole_blocks
from llmc.server.answering import answer
from llmc.server.body import read_body
from llmc.server.errors import ApiError, api_error
from llmc.server.openapi import reads, streams
from llmc.server.protocol.answers import GENERATING
from llmc.server.protocol.blocks import Blocks
from llmc.server.protocol.chunks import typed_event
from llmc.server.protocol.responses import NAMES, ResponseObject, ResponsesRequest, output_item, renamed
from llmc.server.turns import prepare

if TYPE_CHECKING:
    from llmc.runtime.text.answer_parser import AnswerParser
    from llmc.server.generation import Generation

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
