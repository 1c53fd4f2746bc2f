"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid

from fastapi import APIRouter, Request
from fastapi.responses import Response

from llmc.errors import InputError
from llmc.server.access import serving, state_of
from llmc.server.answering import answer
from llmc.server.body import read_body
from llmc.server.chatting import ChatWriter
from llmc.server.errors import api_error
from llmc.server.generation import Generation, check_room
from llmc.server.openapi import reads, streams
from llmc.server.prompts import fitting, render
from llmc.server.protocol.answers import GENERATING, ChatResponse
from llmc.server.protocol.chat import ChatRequest
from llmc.server.tool_choice import tool_use

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    response_model=None,
    responses={200: {"model": ChatResponse, **streams("The answers; chunks where stream is true.")}, **GENERATING},
    openapi_extra=reads(ChatRequest),
)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_body(request, ChatRequest)
    served, config = serving(request, body.model), state_of(request).config
    answer_id = f"chatcmpl-{uuid.uuid4().hex}"
    try:
        use = tool_use(served, body)
        params = body.params(**({} if use.structured is None else {"structured_outputs": use.structured}))
        check_room(served, config, 1, params)
        text = await render(
            request, served, body.messages, use.tools, body.add_generation_prompt, body.continue_final_message,
            body.chat_template_kwargs,
        )  # fmt: skip
        keep = body.truncate_prompt_tokens
        prompts = await fitting(request, served, [text], bool(body.add_special_tokens), keep, "messages")
        name = body.model or served.model_name
        writer = ChatWriter(answer_id, int(time.time()), name, body, served.tokenizer, use.finds_calls, use.limit)
        start = Generation.start(
            served, answer_id, prompts, params, body.priority, served.adapter(body.model), request.headers
        )
        return await answer(request, start, writer, body.stream)
    except InputError as e:
        raise api_error(e, ChatRequest.model_fields) from e
