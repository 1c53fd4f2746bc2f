"""The shapes of answers, for the OpenAPI document; routes write them as plain dictionaries."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class ErrorObject(BaseModel):
    """What went wrong: `param` is the field at fault and `code` a name for the case, where there is one."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Any answer of status 400 and above."""

    error: ErrorObject


class CachedTokens(BaseModel):
    """Prompt tokens that an earlier request left in the cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of prompts and answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class ModelCard(BaseModel):
    """A model; `max_model_len` in tokens, prompt and answer together. Of a LoRA adapter `parent` is the base model's id
    and `root` the name of the adapter's folder."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    root: str
    parent: str | None


class ModelList(BaseModel):
    """The models served: one, and its adapters."""

    object: Literal["list"]
    data: list[ModelCard]


class CompletionLogprobs(BaseModel):
    """Log probabilities of a completion's tokens, in nats."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(BaseModel):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "error"]
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(BaseModel):
    """The answer of /v1/completions."""

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
    """The token chosen at one place, and the most probable ones there."""

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
    """What the model answers."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[MessageToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "error"]
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatResponse(BaseModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class VersionResponse(BaseModel):
    """llmc's version."""

    version: str


Responses = dict[int | str, dict[str, Any]]

_CASES = {
    400: "The request cannot be read or done.",
    401: "No valid API key.",
    404: "The model is not served here.",
    405: "Another method is needed.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    429: "The client has too many requests or connections.",
    500: "The server failed.",
    503: "Loading, overloaded, draining or dead.",
}


def errors(*statuses: int) -> Responses:
    """What a route may answer beside its proper answer, for FastAPI; 401, 429 and 500 any may."""
    found = sorted({*statuses, 401, 429, 500})
    return {status: {"model": ErrorResponse, "description": _CASES[status]} for status in found}


GENERATING = errors(400, 404, 413, 415, 503)
