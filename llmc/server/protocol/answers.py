"""Responses: their schemas for the OpenAPI document, log probabilities, and chunks of a stream."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from json import JSONEncoder
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

if TYPE_CHECKING:
    from llmc.runtime.engine.sampling.batch import TokenLogprobs
    from llmc.runtime.text.tokenizer import Tokenizer


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


LEAST = -9999.0
"""Replaces minus infinity, which JSON lacks."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return the bytes that a token adds to a text; they may be part of a character."""
    token = tokenizer.id_to_token(token_id) or ""
    if tokenizer.is_byte_level:
        return tokenizer.piece(token_id)
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


def _token_text(tokenizer: Tokenizer, token_id: int) -> str:
    return token_bytes(tokenizer, token_id).decode("utf-8", "replace")


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[TokenLogprobs], as_ids: bool = False) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat. `as_ids`: a token is shown as token_id:5, which no other one is."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(tokenizer, token_id)
        shown = f"token_id:{token_id}" if as_ids else raw.decode("utf-8", "replace")
        return {"token": shown, "logprob": max(logprob, LEAST), "bytes": list(raw)}

    content = [
        {**entry(t.token_id, t.logprob), "top_logprobs": [entry(*pair) for pair in t.top]} for t in tokens
    ]  # fmt: skip
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs], offset: int = 0, as_ids: bool = False
) -> dict[str, Any]:
    """Return `choices[].logprobs` of a completion, `as_ids` as above; `offset`: characters before the first token."""
    texts, offsets, tops = [], [], []

    def shown(token_id: int) -> str:
        return f"token_id:{token_id}" if as_ids else _token_text(tokenizer, token_id)

    for t in tokens:
        texts.append(shown(t.token_id))
        offsets.append(offset)
        offset += len(_token_text(tokenizer, t.token_id))
        top = {shown(index): max(logprob, LEAST) for index, logprob in t.top}
        tops.append({**top, texts[-1]: max(t.logprob, LEAST)})
    return {
        "text_offset": offsets,
        "token_logprobs": [max(t.logprob, LEAST) for t in tokens],
        "tokens": texts,
        "top_logprobs": tops,
    }


_json = JSONEncoder(separators=(",", ":")).encode
DONE = b"data: [DONE]\n\n"


def event(data: Mapping[str, Any]) -> bytes:
    """Return one event."""
    return b"data: " + _json(data).encode() + b"\n\n"


def typed_event(data: Mapping[str, Any]) -> bytes:
    """Return one event, with its type also in the field that some clients read."""
    return f"event: {data['type']}\n".encode() + event(data)


class ChunkWriter:
    """Writes the chunks of one response.

    With `usage`, every chunk has the key `usage`, null except in the last. `running` gives the usage of every chunk.
    """

    def __init__(
        self, kind: str, answer_id: str, created: int, model: str,
        usage: bool, running: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        head = _json({"id": answer_id, "object": kind, "created": created, "model": model})
        self._head = f"data: {head[:-1]},"
        self._fixed = ',"usage":null}\n\n' if usage else "}\n\n"
        self._running = running
        open_, close = ('"delta":{"content":', "},") if kind.startswith("chat") else ('"text":', ",")
        self._before = open_
        self._after = f'{close}"logprobs":null,"finish_reason":null}}]'

    @property
    def _tail(self) -> str:
        return self._fixed if self._running is None else f',"usage":{_json(self._running())}}}\n\n'

    def text(self, index: int, text: str) -> bytes:
        """Return a chunk that only adds text."""
        return f'{self._head}"choices":[{{"index":{index},{self._before}{_json(text)}{self._after}{self._tail}'.encode()

    def choice(self, choice: Mapping[str, Any]) -> bytes:
        """Return a chunk with one arbitrary choice."""
        return f'{self._head}"choices":[{_json(choice)}]{self._tail}'.encode()

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """Return the chunk with the usage and no choice."""
        return f'{self._head}"choices":[],"usage":{_json(usage)}}}\n\n'.encode()
