"""POST /v1/completions and /v1/chat/completions: complete prompts and conversations, whole or streamed."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from llmc.errors import InputError
from llmc.server.aside import unless_disconnected
from llmc.server.errors import api_error
from llmc.server.generation import Answer, Generation, answer, check_room
from llmc.server.prompts import completion_prompts
from llmc.server.protocol.answers import (
    DONE,
    GENERATING,
    ChatResponse,
    ChunkWriter,
    CompletionResponse,
    chat_logprobs,
    completion_logprobs,
    token_bytes,
)
from llmc.server.protocol.requests import ChatRequest, CompletionRequest, Sampled
from llmc.server.routes.common import read_body, reads, serving, state_of, streams
from llmc.server.turns import ReadAnswer, prepare

if TYPE_CHECKING:
    from llmc.runtime.engine.requests import Update
    from llmc.runtime.engine.sampling.params import SamplingParams
    from llmc.runtime.text.tokenizer import Tokenizer
    from llmc.server.state import Served

    Updates = list[tuple[int, Update]]

B = TypeVar("B", bound=Sampled)
router = APIRouter()


@dataclass(frozen=True)
class Scored:
    """One request's answers. `texts` are the prompts as they were sent, or None where they were token ids."""

    served: Served
    body: CompletionRequest
    prompts: Sequence[list[int]]
    texts: Sequence[str] | None

    async def answer(
        self, answer_id: str, params: SamplingParams, headers: Mapping[str, str]
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:  # fmt: skip
        """Return the choices and the usage. Raises what `Generation.start` raises."""
        found = [Answer(finish_reason="length") for _ in self.prompts]
        if self.body.logprobs is not None:
            each = [self._forced(params, ids) for ids in self.prompts]
            generation = await Generation.start(
                self.served, answer_id, [ids[:1] for ids in self.prompts], each, self.body.priority,
                self.served.adapter(self.body.model), headers,
            )  # fmt: skip
            found = await generation.answers()
        choices, generated = [], 0
        for index, (ids, one) in enumerate(zip(self.prompts, found, strict=True)):
            kept, reason = self._generated(ids, one)
            generated += len(kept)
            choices.append(self._choice(index, ids, kept, one, reason))
        count = sum(map(len, self.prompts))
        usage = {
            "prompt_tokens": count, "completion_tokens": generated, "total_tokens": count + generated,
            "prompt_tokens_details": {"cached_tokens": 0},
        }  # fmt: skip
        return choices, usage

    def _forced(self, params: SamplingParams, ids: Sequence[int]) -> SamplingParams:
        """The parameters that make the engine write the prompt, whose end tokens do not end it."""
        forced, wanted = len(ids) - 1, self.body.wanted
        most = None if wanted == -1 else max(1, forced + wanted)
        return replace(params, max_tokens=most, min_tokens=forced, forced_token_ids=ids[1:], ignore_eos=True)

    def _generated(self, ids: Sequence[int], one: Answer) -> tuple[list[int], str]:
        """The tokens after the prompt, up to an end token, and why they ended."""
        after = one.token_ids[len(ids) - 1 :] if self.body.wanted else []
        ends = self.served.tokenizer.eos_token_ids
        end = next((n for n, index in enumerate(after) if index in ends and not self.body.ignore_eos), None)
        return (after, one.finish_reason) if end is None else (after[:end], "stop")

    def _choice(self, index: int, ids: list[int], kept: list[int], one: Answer, reason: str) -> dict[str, Any]:
        tokenizer, body = self.served.tokenizer, self.body
        prompt = tokenizer.decode(ids)
        text = tokenizer.decode([*ids, *kept])[len(prompt) :] if kept else ""
        echo = (prompt if self.texts is None else self.texts[index]) if body.echo else ""
        choice: dict[str, Any] = {
            "index": index, "text": echo + text, "logprobs": None, "finish_reason": reason or "length",
            "stop_reason": one.stop_reason,
        }  # fmt: skip
        if body.logprobs is not None and body.echo:
            first = f"token_id:{ids[0]}" if body.as_ids else tokenizer.decode(ids[:1], skip_special_tokens=False)
            offset = len(tokenizer.decode(ids[:1], skip_special_tokens=False))
            rest = completion_logprobs(tokenizer, one.logprobs[: len(ids) - 1 + len(kept)], offset, body.as_ids)
            before = {"text_offset": 0, "token_logprobs": None, "tokens": first, "top_logprobs": None}
            choice["logprobs"] = {name: [before[name], *values] for name, values in rest.items()}
        if body.return_token_ids:
            choice |= {"token_ids": kept, "prompt_token_ids": list(ids)}
        return choice


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
        writer = CompletionWriter(answer_id, body.model or served.model_name, body, served.tokenizer, echoes)
        if body.scores:
            scored = Scored(served, body, prompts, texts)
            answered = unless_disconnected(request.receive, scored.answer(answer_id, params, request.headers))
            return JSONResponse(writer.of(*await answered))
        start = Generation.start(
            served, answer_id, prompts, params, body.priority, served.adapter(body.model), request.headers
        )
        return await answer(request, start, writer, body.stream)
    except InputError as e:
        raise api_error(body.named(e), CompletionRequest.model_fields) from e


@dataclass(frozen=True)
class _Writer(ABC, Generic[B]):
    kind: ClassVar[str]
    chunk: ClassVar[str]

    answer_id: str
    model: str
    body: B
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()), kw_only=True)

    def of(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the whole response with these choices."""
        return {
            "id": self.answer_id, "object": self.kind, "created": self.created, "model": self.model,
            "choices": choices, "usage": usage,
        }  # fmt: skip

    async def stream(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Yield the response in events; those that are ready together are joined."""
        usage = self.body.includes_usage
        running = (lambda: generation.usage) if self.body.has_running_usage else None
        writer = ChunkWriter(self.chunk, self.answer_id, self.created, self.model, usage, running)
        written = self._chunks_of(writer, generation)
        async with aclosing(generation.updates()) as news:
            async for updates in news:
                yield b"".join(written(updates))
        yield (writer.usage(generation.usage) if usage else b"") + DONE

    @abstractmethod
    def _chunks_of(self, writer: ChunkWriter, generation: Generation) -> Callable[[Updates], list[bytes]]:
        """Return what turns updates into chunks."""


@dataclass(frozen=True)
class CompletionWriter(_Writer[CompletionRequest]):
    """`echoes`: text to put before each prompt's completions ("" without echo)."""

    kind = chunk = "text_completion"
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
        return self.of(choices, generation.usage)

    def _chunks_of(self, writer: ChunkWriter, generation: Generation) -> Callable[[Updates], list[bytes]]:
        offsets = [len(self.echoes[i // generation.n]) for i in range(generation.choices)]
        started: set[int] = set()

        def written(updates: Updates) -> list[bytes]:
            parts = []
            for index, update in updates:
                prompt = index // generation.n
                if index not in started:
                    started.add(index)
                    parts.append(self._first(writer, index, generation.prompts[prompt], self.echoes[prompt]))
                parts.append(self._chunk(writer, index, update, offsets))
            return parts

        return written

    @property
    def _logprobs(self) -> bool:
        return self.body.logprobs is not None

    def _first(self, writer: ChunkWriter, index: int, prompt: Sequence[int], echo: str) -> bytes:
        if self.body.return_token_ids:
            return writer.choice({**_choice(index, "text", echo), "prompt_token_ids": list(prompt), "token_ids": []})
        return writer.text(index, echo) if echo else b""

    def _chunk(self, writer: ChunkWriter, index: int, update: Update, offsets: list[int]) -> bytes:
        if update.finish_reason is None and not self._logprobs and not self.body.return_token_ids:
            return writer.text(index, update.text) if update.text else b""
        choice = _choice(index, "text", update.text)
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

        def read() -> ReadAnswer | None:
            return None if turn.plain else ReadAnswer(turn.read())

        writer = ChatWriter(answer_id, body.model or served.model_name, body, served.tokenizer, read)
        return await answer(request, turn.start, writer, body.stream)
    except InputError as e:
        raise api_error(body.named(e), ChatRequest.model_fields) from e


@dataclass(frozen=True)
class ChatWriter(_Writer[ChatRequest]):
    """`read` returns what reads one choice's text, or None for plain text."""

    kind, chunk = "chat.completion", "chat.completion.chunk"
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
        whole = self.of(choices, generation.usage)
        if self.body.return_token_ids:
            whole["prompt_token_ids"] = list(generation.prompts[0])
        return whole

    def _chunks_of(self, writer: ChunkWriter, generation: Generation) -> Callable[[Updates], list[bytes]]:
        readers = [self.read() for _ in range(generation.choices)]
        first = [self._first(writer, index, generation) for index in range(generation.choices)]

        def written(updates: Updates) -> list[bytes]:
            parts, first[:] = first[:], []
            for index, update in updates:
                parts += self._chunks(writer, index, update, readers[index])
            return parts

        return written

    def _first(self, writer: ChunkWriter, index: int, generation: Generation) -> bytes:
        choice = _choice(index, "delta", {"role": "assistant", "content": ""})
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
                chunks.append(writer.choice({**_choice(index, "delta", delta), **extras}))
        for delta in deltas:
            plain = len(delta) == 1 and "content" in delta
            chunks.append(
                writer.text(index, delta["content"]) if plain else writer.choice(_choice(index, "delta", delta))
            )
        if update.finish_reason is not None:
            reason = update.finish_reason if reader is None else reader.reason(update.finish_reason)
            last = {**_choice(index, "delta", {}), "finish_reason": reason, "stop_reason": update.stop_reason}
            chunks.append(writer.choice(last))
        return chunks


def _choice(index: int, what: str, content: Any) -> dict[str, Any]:
    return {"index": index, what: content, "logprobs": None, "finish_reason": None}
