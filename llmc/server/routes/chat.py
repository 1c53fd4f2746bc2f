"""POST /v1/chat/completions: complete conversations, whole or streamed."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
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
from llmc.server.generation import Generation, check_room
from llmc.server.openapi import reads, streams
from llmc.server.prompts import fitting, render
from llmc.server.protocol.answers import GENERATING, ChatResponse
from llmc.server.protocol.chat import ChatRequest
from llmc.server.protocol.chunks import DONE, ChunkWriter
from llmc.server.protocol.logprobs import chat_logprobs
from llmc.server.tool_calls import ToolCall, ToolCallParser, tool_use

if TYPE_CHECKING:
    from llmc.runtime.engine.requests import Update
    from llmc.runtime.text.tokenizer import Tokenizer

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
        use = tool_use(served, body)
        params = body.params(**({} if use.structured is None else {"structured_outputs": use.structured}))
        check_room(served, config, 1, params)
        text = await render(
            request, served, body.messages, use.tools, body.add_generation_prompt, body.continue_final_message,
            body.chat_template_kwargs,
        )  # fmt: skip
        keep = body.truncate_prompt_tokens
        prompts = await fitting(request, served, [text], bool(body.add_special_tokens), keep, "messages")
        name = body.model or served.model_name
        writer = ChatWriter(answer_id, int(time.time()), name, body, served.tokenizer, use.finds_calls, use.limit)
        start = Generation.start(
            served, answer_id, prompts, params, body.priority, served.adapter(body.model), request.headers
        )
        return await answer(request, start, writer, body.stream)
    except InputError as e:
        raise api_error(e, ChatRequest.model_fields) from e


@dataclass(frozen=True)
class ChatWriter:
    """Writes the response of one request. `finds_calls`: find tool calls in the text, at most `call_limit`."""

    answer_id: str
    created: int
    model: str
    body: ChatRequest
    tokenizer: Tokenizer
    finds_calls: bool = False
    call_limit: int | None = None

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """Return the whole response."""
        choices = []
        for index, one in enumerate(await generation.answers()):
            message: dict[str, Any] = {"role": "assistant", "content": one.text, "refusal": None}
            reason = one.finish_reason
            if self.finds_calls:
                parser = ToolCallParser(self.call_limit)
                found = parser.feed(one.text) + parser.flush()
                calls = [part.to_dict() for part in found if isinstance(part, ToolCall)]
                if calls:
                    text = "".join(part for part in found if isinstance(part, str))
                    message |= {"content": text or None, "tool_calls": calls}
                    reason = _reason(reason, len(calls))
            choice = {
                "index": index,
                "message": message,
                "logprobs": chat_logprobs(self.tokenizer, one.logprobs) if self.body.logprobs else None,
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
        writer = ChunkWriter("chat.completion.chunk", self.answer_id, self.created, self.model, usage)
        parsers = [ToolCallParser(self.call_limit) if self.finds_calls else None for _ in range(generation.choices)]
        started = False
        async with aclosing(generation.updates()) as news:
            async for updates in news:
                parts = []
                if not started:
                    started = True
                    parts += [self._first(writer, index, generation) for index in range(generation.choices)]
                for index, update in updates:
                    parts += self._chunks(writer, index, update, parsers[index])
                yield b"".join(parts)
        yield (writer.usage(generation.usage) if usage else b"") + DONE

    def _first(self, writer: ChunkWriter, index: int, generation: Generation) -> bytes:
        choice = _choice(index, {"role": "assistant", "content": ""})
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = list(generation.prompts[0])
        return writer.choice(choice)

    def _chunks(
        self, writer: ChunkWriter, index: int, update: Update, parser: ToolCallParser | None
    ) -> list[bytes]:  # fmt: skip
        parts: list[str | ToolCall] = [update.text] if update.text else []
        if parser is not None:
            before = parser.calls
            parts = parser.feed(update.text) + (parser.flush() if update.finish_reason else [])
        chunks = []
        if self.body.logprobs or self.body.return_token_ids:
            extras: dict[str, Any] = {}
            if self.body.logprobs and update.logprobs:
                extras["logprobs"] = chat_logprobs(self.tokenizer, update.logprobs)
            if self.body.return_token_ids and update.token_ids:
                extras["token_ids"] = list(update.token_ids)
            if extras:
                text = parts.pop(0) if parts and isinstance(parts[0], str) else ""
                chunks.append(writer.choice({**_choice(index, {"content": text}), **extras}))
        for part in parts:
            if isinstance(part, str):
                chunks.append(writer.text(index, part))
            else:
                delta = {"tool_calls": [{"index": before, **part.to_dict()}]}
                before += 1
                chunks.append(writer.choice(_choice(index, delta)))
        if update.finish_reason is not None:
            reason = _reason(update.finish_reason, parser.calls if parser else 0)
            last = {**_choice(index, {}), "finish_reason": reason, "stop_reason": update.stop_reason}
            chunks.append(writer.choice(last))
        return chunks


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _reason(reason: str, calls: int) -> str:
    """Return "tool_calls" for a choice that stopped by itself with calls."""
    return "tool_calls" if calls and reason == "stop" else reason
