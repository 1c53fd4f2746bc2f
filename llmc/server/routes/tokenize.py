"""POST /tokenize and POST /detokenize, in vLLM's format."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from llmc.errors import InputError
from llmc.server.aside import aside
from llmc.server.errors import api_error, bad_request
from llmc.server.prompts import encode_each, render
from llmc.server.protocol import base
from llmc.server.protocol.answers import GENERATING
from llmc.server.protocol.base import MAX_IDS, AtMost, Body, BodyPart, Name, Object, Refused, Text
from llmc.server.protocol.requests import Messages, Tool, empty
from llmc.server.routes.common import check_model, read_body, reads, served_of


class TokenizeRequest(Body):
    """Tokenize a text, or a conversation as formatted by the chat template; set one of prompt and messages."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true for a prompt, false for messages.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Object | None = None
    tools: Annotated[list[Tool], AtMost(base.MAX_TOOLS)] | None = None
    return_token_strs: bool | None = None

    refused: ClassVar[Refused] = {"chat_template": (empty, "the model's own template is used")}


class TokenizeResponse(BodyPart):
    """Token ids, their number, and the model's limit of prompt and answer tokens together."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    """Convert token ids to text, including special tokens."""

    model: Name | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], AtMost(base.MAX_IDS)]


class DetokenizeResponse(BodyPart):
    """The text."""

    prompt: str


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
