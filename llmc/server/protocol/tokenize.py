"""Requests and responses of POST /tokenize and /detokenize, in vLLM's format."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from llmc.server.protocol import bounds
from llmc.server.protocol.base import Body, BodyPart, Refused
from llmc.server.protocol.bounds import AtMost, Name, Object, Text
from llmc.server.protocol.chat import Messages, Tool
from llmc.server.protocol.sampling import empty


class TokenizeRequest(Body):
    """Tokenize a text, or a conversation as formatted by the chat template; set one of prompt and messages."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true for a prompt, false for messages.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Object | None = None
    tools: Annotated[list[Tool], AtMost(bounds.MAX_TOOLS)] | None = None
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
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], AtMost(bounds.MAX_IDS)]


class DetokenizeResponse(BodyPart):
    """The text."""

    prompt: str
