"""POST /tokenize and POST /detokenize, as vLLM has them."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from llmc.errors import InputError
from llmc.runtime.server.access import check_model, served_of
from llmc.runtime.server.body import read_body
from llmc.runtime.server.errors import api_error, bad_request
from llmc.runtime.server.openapi import reads
from llmc.runtime.server.prompts import encode, render
from llmc.runtime.server.protocol.answers import GENERATING
from llmc.runtime.server.protocol.tokenize import (
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
    """The tokens of a prompt or of a conversation."""
    body = await read_body(request, TokenizeRequest)
    served = served_of(request)
    check_model(served, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give one of prompt and messages", "prompt")
    special = body.add_special_tokens
    try:
        if body.prompt is not None:
            ids = await encode(request, served, body.prompt, special is not False)
        else:
            text = await render(
                request, served, body.messages or [], body.tools, body.add_generation_prompt,
                body.continue_final_message, body.chat_template_kwargs,
            )  # fmt: skip
            ids = await encode(request, served, text, bool(special))
    except InputError as e:
        raise api_error(e, TokenizeRequest.model_fields) from e
    answer = {"count": len(ids), "max_model_len": served.limits.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [served.tokenizer.id_to_token(index) or "" for index in ids]
    return JSONResponse(answer)


@router.post(
    "/detokenize", response_model=None, responses={200: {"model": DetokenizeResponse}, **GENERATING},
    openapi_extra=reads(DetokenizeRequest),
)  # fmt: skip
async def detokenize(request: Request) -> Response:
    """The text of tokens."""
    body = await read_body(request, DetokenizeRequest)
    served = served_of(request)
    check_model(served, body.model)
    return JSONResponse({"prompt": served.tokenizer.decode(body.tokens, skip_special_tokens=False)})
