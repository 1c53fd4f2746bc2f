"""POST /v1/completions: complete prompts, whole or streamed."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from llmc.errors import InputError
from llmc.server.access import serving, state_of
from llmc.server.answering import answer
from llmc.server.aside import unless_disconnected
from llmc.server.body import read_body
from llmc.server.errors import api_error
from llmc.server.generation import Generation, check_room
from llmc.server.openapi import reads, streams
from llmc.server.prompts import completion_prompts
from llmc.server.protocol.answers import GENERATING, CompletionResponse
from llmc.server.protocol.chunks import DONE, ChunkWriter
from llmc.server.protocol.completions import CompletionRequest
from llmc.server.protocol.logprobs import completion_logprobs, token_bytes
from llmc.server.scoring import Scored

if TYPE_CHECKING:
    from llmc.runtime.engine.requests import Update
    from llmc.runtime.text.tokenizer import Tokenizer

router = APIRouter()


@router.post(
    "/v1/completions",
    response_model=None,
    responses={200: {"model": CompletionResponse, **streams("The texts; with stream, chunks of them.")}, **GENERATING},
    openapi_extra=reads(CompletionRequest),
)
async def completions(request: Request) -> Response:
    """Complete prompts."""
    body = await read_body(request, CompletionRequest)
    served, config = serving(request, body.model), state_of(request).config
    answer_id = f"cmpl-{uuid.uuid4().hex}"
    try:
        params = body.params().filled(config.recommended(served))
        check_room(served, config, len(body.prompt), params)
        prompts = await completion_prompts(request, served, body)
        texts = body.prompt if isinstance(body.prompt[0], str) and body.truncate_prompt_tokens is None else None
        echoes = [""] * len(prompts)
        if body.echo:
            echoes = texts or [served.tokenizer.decode(ids) for ids in prompts]
        name = body.model or served.model_name
        if body.scores:
            scored = Scored(served, body, prompts, texts)
            answered = unless_disconnected(request.receive, scored.answer(answer_id, params, request.headers))
            choices, usage = await answered
            return JSONResponse({
                "id": answer_id, "object": "text_completion", "created": int(time.time()), "model": name,
                "choices": choices, "usage": usage,
            })  # fmt: skip
        writer = CompletionWriter(answer_id, int(time.time()), name, body, served.tokenizer, echoes)
        start = Generation.start(
            served, answer_id, prompts, params, body.priority, served.adapter(body.model), request.headers
        )
        return await answer(request, start, writer, body.stream)
    except InputError as e:
        raise api_error(body.named(e), CompletionRequest.model_fields) from e


@dataclass(frozen=True)
class CompletionWriter:
    """Writes the response of one request. `echoes`: text to put before each prompt's completions ("" without echo)."""

    answer_id: str
    created: int
    model: str
    body: CompletionRequest
    tokenizer: Tokenizer
    echoes: Sequence[str]

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """Return the whole response."""
        choices = []
        for index, one in enumerate(await generation.answers()):
            prompt = index // generation.n
            echo = self.echoes[prompt]
            choice = {
                "index": index,
                "text": echo + one.text,
                "logprobs": completion_logprobs(self.tokenizer, one.logprobs, len(echo), self.body.as_ids)
                if self._logprobs
                else None,
                "finish_reason": one.finish_reason,
                "stop_reason": one.stop_reason,
            }
            if self.body.return_token_ids:
                choice |= {"token_ids": one.token_ids, "prompt_token_ids": list(generation.prompts[prompt])}
            choices.append(choice)
        return {
            "id": self.answer_id, "object": "text_completion", "created": self.created, "model": self.model,
            "choices": choices, "usage": generation.usage,
        }  # fmt: skip

    async def stream(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Yield the response in events; those that are ready together are joined."""
        usage = self.body.includes_usage
        running = (lambda: generation.usage) if self.body.has_running_usage else None
        writer = ChunkWriter("text_completion", self.answer_id, self.created, self.model, usage, running)
        offsets = [len(self.echoes[i // generation.n]) for i in range(generation.choices)]
        started = [False] * generation.choices
        async with aclosing(generation.updates()) as news:
            async for updates in news:
                parts = []
                for index, update in updates:
                    prompt = index // generation.n
                    if not started[index]:
                        started[index] = True
                        parts.append(self._first(writer, index, generation.prompts[prompt], self.echoes[prompt]))
                    parts.append(self._chunk(writer, index, update, offsets))
                yield b"".join(parts)
        yield (writer.usage(generation.usage) if usage else b"") + DONE

    @property
    def _logprobs(self) -> bool:
        return self.body.logprobs is not None

    def _first(self, writer: ChunkWriter, index: int, prompt: Sequence[int], echo: str) -> bytes:
        if self.body.return_token_ids:
            return writer.choice({**_choice(index, echo), "prompt_token_ids": list(prompt), "token_ids": []})
        return writer.text(index, echo) if echo else b""

    def _chunk(self, writer: ChunkWriter, index: int, update: Update, offsets: list[int]) -> bytes:
        if update.finish_reason is None and not self._logprobs and not self.body.return_token_ids:
            return writer.text(index, update.text) if update.text else b""
        choice = _choice(index, update.text)
        if self._logprobs and update.logprobs:
            choice["logprobs"] = completion_logprobs(self.tokenizer, update.logprobs, offsets[index], self.body.as_ids)
            offsets[index] += sum(
                len(token_bytes(self.tokenizer, t.token_id).decode("utf-8", "replace")) for t in update.logprobs
            )
        if self.body.return_token_ids:
            choice["token_ids"] = list(update.token_ids)
        if update.finish_reason is not None:
            choice |= {"finish_reason": update.finish_reason, "stop_reason": update.stop_reason}
        return writer.choice(choice)


def _choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}
