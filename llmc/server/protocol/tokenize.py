"""POST /tokenize and /detokenize: requests and answers, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from llmc.server.protocol import bounds
from llmc.server.protocol.base import Body, BodyPart, Refused
from llmc.server.protocol.bounds import AtMost, Name, Object, Text
from llmc.server.protocol.chat import Messages, Tool
from llmc.server.protocol.sampling import empty


class TokenizeRequest(Body):
    """The tokens of a text, or of a conversation as the chat template writes it; one of prompt and messages."""

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
    """Token ids, their number, and how many the model takes of prompt and answer together."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    """The text of token ids, special tokens included."""

    model: Name | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], AtMost(bounds.MAX_IDS)]


class DetokenizeResponse(BodyPart):
    """The text."""

    prompt: str
