"""Response schemas for the OpenAPI document; routes write the responses as plain dictionaries."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class ErrorObject(BaseModel):
    """An error: `param` is the field at fault and `code` an identifier of the case, or null."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Any response of status 400 and above."""

    error: ErrorObject


class CachedTokens(BaseModel):
    """Prompt tokens that an earlier request left in the cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Prompt and completion tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class ModelCard(BaseModel):
    """A model; `max_model_len` counts prompt and answer tokens together.

    `default_sampling_params` are the parameters of requests that give none. For a LoRA adapter, `parent` is the base
    model's id and `root` the name of the adapter's folder.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    root: str
    parent: str | None
    default_sampling_params: dict[str, float | int]


class ModelList(BaseModel):
    """The served model and its adapters."""

    object: Literal["list"]
    data: list[ModelCard]


class CompletionLogprobs(BaseModel):
    """Log probabilities of a completion's tokens, in nats; null of a prompt's first one."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "error"]
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(BaseModel):
    """The response of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TokenLogprob(BaseModel):
    """A token, its log probability in nats, and its bytes, which may be part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """The chosen token at one position, and the most probable ones there."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Log probabilities of a message's tokens."""

    content: list[ChosenLogprob]
    refusal: None = None


class CalledFunction(BaseModel):
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


class MessageToolCall(BaseModel):
    """One tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(BaseModel):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[MessageToolCall] | None = None


class ChatChoice(BaseModel):
    """One choice of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "error"]
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatResponse(BaseModel):
    """The response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class VersionResponse(BaseModel):
    """The version of llmc."""

    version: str


Responses = dict[int | str, dict[str, Any]]

_CASES = {
    400: "The request cannot be read or served.",
    401: "No valid API key.",
    404: "The model is not served here.",
    405: "The method is not allowed.",
    413: "The body is too large.",
    415: "The Content-Type is not JSON.",
    429: "The client has too many requests or connections.",
    500: "The server failed.",
    503: "Loading, overloaded, draining or dead.",
}


def errors(*statuses: int) -> Responses:
    """Return a route's error responses for FastAPI; 401, 429 and 500 are always included."""
    found = sorted({*statuses, 401, 429, 500})
    return {status: {"model": ErrorResponse, "description": _CASES[status]} for status in found}


GENERATING = errors(400, 404, 413, 415, 503)
