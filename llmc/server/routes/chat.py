"""POST /v1/chat/completions: complete conversations, whole or streamed."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from llmc.errors import InputError
from llmc.server.access import serving, state_of
from llmc.server.answering import answer
from llmc.server.body import read_body
from llmc.server.errors import api_error
from llmc.server.openapi import reads, streams
from llmc.server.protocol.answers import GENERATING, ChatResponse
from llmc.server.protocol.chat import ChatRequest
from llmc.server.protocol.chunks import DONE, ChunkWriter
from llmc.server.protocol.logprobs import chat_logprobs
from llmc.server.tool_calls import ReadAnswer
from llmc.server.turns import prepare

if TYPE_CHECKING:
    from llmc.runtime.engine.requests import Update
    from llmc.runtime.text.tokenizer import Tokenizer
    from llmc.server.generation import Generation

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    response_model=None,
    responses={200: {"model": ChatResponse, **streams("The completion; with stream, chunks of it.")}, **GENERATING},
    openapi_extra=reads(ChatRequest),
)
async def chat_completions(request: Request) -> Response:
    """Complete a conversation."""
    body = await read_body(request, ChatRequest)
    served, config = serving(request, body.model), state_of(request).config
    answer_id = f"chatcmpl-{uuid.uuid4().hex}"
    try:
        turn = await prepare(request, served, config, body, answer_id)
        name = body.model or served.model_name

        def read() -> ReadAnswer | None:
            return None if turn.plain else ReadAnswer(turn.read())

        writer = ChatWriter(answer_id, int(time.time()), name, body, served.tokenizer, read)
        return await answer(request, turn.start, writer, body.stream)
    except InputError as e:
        raise api_error(body.named(e), ChatRequest.model_fields) from e


@dataclass(frozen=True)
class ChatWriter:
    """Writes the response of one request. `read` returns what reads one choice's text, or None for plain text."""

    answer_id: str
    created: int
    model: str
    body: ChatRequest
    tokenizer: Tokenizer
    read: Callable[[], ReadAnswer | None]

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """Return the whole response."""
        choices = []
        for index, one in enumerate(await generation.answers()):
            message: dict[str, Any] = {"role": "assistant", "content": one.text, "refusal": None}
            reason = one.finish_reason
            if (reader := self.read()) is not None:
                reader.deltas(one.text, reason, one.stop_reason)
                message, reason = reader.message(), reader.reason(reason)
            choice = {
                "index": index,
                "message": message,
                "logprobs": chat_logprobs(self.tokenizer, one.logprobs, self.body.as_ids)
                if self.body.logprobs
                else None,
                "finish_reason": reason,
                "stop_reason": one.stop_reason,
            }
            if self.body.return_token_ids:
                choice["token_ids"] = one.token_ids
            choices.append(choice)
        whole = {
            "id": self.answer_id, "object": "chat.completion", "created": self.created, "model": self.model,
            "choices": choices, "usage": generation.usage,
        }  # fmt: skip
        if self.body.return_token_ids:
            whole["prompt_token_ids"] = list(generation.prompts[0])
        return whole

    async def stream(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Yield the response in events; those that are ready together are joined."""
        usage = self.body.includes_usage
        running = (lambda: generation.usage) if self.body.has_running_usage else None
        writer = ChunkWriter("chat.completion.chunk", self.answer_id, self.created, self.model, usage, running)
        readers = [self.read() for _ in range(generation.choices)]
        started = False
        async with aclosing(generation.updates()) as news:
            async for updates in news:
                parts = []
                if not started:
                    started = True
                    parts += [self._first(writer, index, generation) for index in range(generation.choices)]
                for index, update in updates:
                    parts += self._chunks(writer, index, update, readers[index])
                yield b"".join(parts)
        yield (writer.usage(generation.usage) if usage else b"") + DONE

    def _first(self, writer: ChunkWriter, index: int, generation: Generation) -> bytes:
        choice = _choice(index, {"role": "assistant", "content": ""})
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = list(generation.prompts[0])
        return writer.choice(choice)

    def _chunks(self, writer: ChunkWriter, index: int, update: Update, reader: ReadAnswer | None) -> list[bytes]:
        deltas: list[dict[str, Any]] = [{"content": update.text}] if update.text else []
        if reader is not None:
            deltas = reader.deltas(update.text, update.finish_reason, update.stop_reason)
        chunks = []
        if self.body.logprobs or self.body.return_token_ids:
            extras: dict[str, Any] = {}
            if self.body.logprobs and update.logprobs:
                extras["logprobs"] = chat_logprobs(self.tokenizer, update.logprobs, self.body.as_ids)
            if self.body.return_token_ids and update.token_ids:
                extras["token_ids"] = list(update.token_ids)
            if extras:
                delta = deltas.pop(0) if deltas and "content" in deltas[0] else {"content": ""}
                chunks.append(writer.choice({**_choice(index, delta), **extras}))
        for delta in deltas:
            plain = len(delta) == 1 and "content" in delta
            chunks.append(writer.text(index, delta["content"]) if plain else writer.choice(_choice(index, delta)))
        if update.finish_reason is not None:
            reason = update.finish_reason if reader is None else reader.reason(update.finish_reason)
            last = {**_choice(index, {}), "finish_reason": reason, "stop_reason": update.stop_reason}
            chunks.append(writer.choice(last))
        return chunks


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
