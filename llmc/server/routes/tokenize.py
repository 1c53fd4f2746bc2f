"""POST /tokenize and POST /detokenize, as in vLLM."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from llmc.errors import InputError
from llmc.server.access import check_model, served_of
from llmc.server.aside import aside
from llmc.server.body import read_body
from llmc.server.errors import api_error, bad_request
from llmc.server.openapi import reads
from llmc.server.prompts import encode_each, render
from llmc.server.protocol.answers import GENERATING
from llmc.server.protocol.bounds import MAX_IDS
from llmc.server.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)

router = APIRouter()


@router.post(
    "/tokenize", response_model=None, responses={200: {"model": TokenizeResponse}, **GENERATING},
    openapi_extra=reads(TokenizeRequest),
)  # fmt: skip
async def tokenize(request: Request) -> Response:
    """Tokenize a prompt or a conversation."""
    body = await read_body(request, TokenizeRequest)
    served = served_of(request)
    check_model(served, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give one of prompt and messages", "prompt")
    special = body.add_special_tokens
    try:
        if body.prompt is not None:
            text, special = body.prompt, special is not False
        else:
            text = await render(
                request, served, body.messages or [], body.tools, body.add_generation_prompt,
                body.continue_final_message, body.chat_template_kwargs,
            )  # fmt: skip
        ((ids, count),) = await encode_each(request, served, [text], bool(special), MAX_IDS)
        if count > MAX_IDS:
            raise bad_request(f"the text has {count} tokens; at most {MAX_IDS} are returned", "prompt")
    except InputError as e:
        raise api_error(e, TokenizeRequest.model_fields) from e

    def written() -> Response:
        whole: dict[str, Any] = {"count": count, "max_model_len": served.limits.max_model_len, "tokens": ids}
        if body.return_token_strs:
            whole["token_strs"] = [served.tokenizer.id_to_token(index) or "" for index in ids]
        return JSONResponse(whole)

    return await aside(request, count, written)


@router.post(
    "/detokenize", response_model=None, responses={200: {"model": DetokenizeResponse}, **GENERATING},
    openapi_extra=reads(DetokenizeRequest),
)  # fmt: skip
async def detokenize(request: Request) -> Response:
    """Convert tokens to text."""
    body = await read_body(request, DetokenizeRequest)
    served = served_of(request)
    check_model(served, body.model)
    ids = body.tokens
    return await aside(
        request, len(ids), lambda: JSONResponse({"prompt": served.tokenizer.decode(ids, skip_special_tokens=False)})
    )  # fmt: skip
