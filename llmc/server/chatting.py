"""Answers to /v1/chat/completions, whole and as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmc.server.protocol.chunks import DONE, ChunkWriter
from llmc.server.protocol.logprobs import chat_logprobs
from llmc.server.tool_calls import ToolCall, ToolCallParser

if TYPE_CHECKING:
    from llmc.runtime.engine.requests import Update
    from llmc.runtime.text.tokenizer import Tokenizer
    from llmc.server.generation import Generation
    from llmc.server.protocol.chat import ChatRequest


@dataclass(frozen=True)
class ChatWriter:
    """Writes the answer to one request. `finds_calls`: tool calls are looked for in the text, `call_limit` at most."""

    answer_id: str
    created: int
    model: str
    body: ChatRequest
    tokenizer: Tokenizer
    finds_calls: bool = False
    call_limit: int | None = None

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """All of it."""
        choices = []
        for index, answer in enumerate(await generation.answers()):
            message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
            reason = answer.finish_reason
            if self.finds_calls:
                parser = ToolCallParser(self.call_limit)
                found = parser.feed(answer.text) + parser.flush()
                calls = [part.to_dict() for part in found if isinstance(part, ToolCall)]
                if calls:
                    text = "".join(part for part in found if isinstance(part, str))
                    message |= {"content": text or None, "tool_calls": calls}
                    reason = _reason(reason, len(calls))
            choice = {
                "index": index,
                "message": message,
                "logprobs": chat_logprobs(self.tokenizer, answer.logprobs) if self.body.logprobs else None,
                "finish_reason": reason,
                "stop_reason": answer.stop_reason,
            }
            if self.body.return_token_ids:
                choice["token_ids"] = answer.token_ids
            choices.append(choice)
        whole = {
            "id": self.answer_id, "object": "chat.completion", "created": self.created, "model": self.model,
            "choices": choices, "usage": generation.usage,
        }  # fmt: skip
        if self.body.return_token_ids:
            whole["prompt_token_ids"] = list(generation.prompts[0])
        return whole

    async def stream(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The same in pieces: events, several of them together where they come together."""
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
    """An answer that ended by itself with calls ended for them."""
    return "tool_calls" if calls and reason == "stop" else reason
