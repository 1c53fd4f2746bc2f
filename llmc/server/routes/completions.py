"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid

from fastapi import APIRouter, Request
from fastapi.responses import Response

from llmc.errors import InputError
from llmc.server.access import serving, state_of
from llmc.server.answering import answer
from llmc.server.body import read_body
from llmc.server.completing import CompletionWriter
from llmc.server.errors import api_error
from llmc.server.generation import Generation, check_room
from llmc.server.openapi import reads, streams
from llmc.server.prompts import completion_prompts
from llmc.server.protocol.answers import GENERATING, CompletionResponse
from llmc.server.protocol.completions import CompletionRequest

router = APIRouter()


@router.post(
    "/v1/completions",
    response_model=None,
    responses={200: {"model": CompletionResponse, **streams("The texts; chunks where stream is true.")}, **GENERATING},
    openapi_extra=reads(CompletionRequest),
)
async def completions(request: Request) -> Response:
    """Continue prompts."""
    body = await read_body(request, CompletionRequest)
    served, config = serving(request, body.model), state_of(request).config
    answer_id = f"cmpl-{uuid.uuid4().hex}"
    try:
        params = body.params()
        check_room(served, config, len(body.prompt), params)
        prompts = await completion_prompts(request, served, body)
        texts = body.prompt if isinstance(body.prompt[0], str) and body.truncate_prompt_tokens is None else None
        echoes = [""] * len(prompts)
        if body.echo:
            echoes = texts or [served.tokenizer.decode(ids) for ids in prompts]
        name = body.model or served.model_name
        writer = CompletionWriter(answer_id, int(time.time()), name, body, served.tokenizer, echoes)
        start = Generation.start(
            served, answer_id, prompts, params, body.priority, served.adapter(body.model), request.headers
        )
        return await answer(request, start, writer, body.stream)
    except InputError as e:
        raise api_error(e, CompletionRequest.model_fields) from e
