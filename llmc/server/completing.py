"""Answers to /v1/completions, whole and as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmc.server.protocol.chunks import DONE, ChunkWriter
from llmc.server.protocol.logprobs import completion_logprobs, token_bytes

if TYPE_CHECKING:
    from llmc.runtime.engine.requests import Update
    from llmc.runtime.text.tokenizer import Tokenizer
    from llmc.server.generation import Generation
    from llmc.server.protocol.completions import CompletionRequest


@dataclass(frozen=True)
class CompletionWriter:
    """Writes the answer to one request. `echoes`: what each prompt's texts begin with ("" without echo)."""

    answer_id: str
    created: int
    model: str
    body: CompletionRequest
    tokenizer: Tokenizer
    echoes: Sequence[str]

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """All of it."""
        choices = []
        for index, answer in enumerate(await generation.answers()):
            prompt = index // generation.n
            echo = self.echoes[prompt]
            choice = {
                "index": index,
                "text": echo + answer.text,
                "logprobs": completion_logprobs(self.tokenizer, answer.logprobs, len(echo)) if self._logprobs else None,
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
            }
            if self.body.return_token_ids:
                choice |= {"token_ids": answer.token_ids, "prompt_token_ids": list(generation.prompts[prompt])}
            choices.append(choice)
        return {
            "id": self.answer_id, "object": "text_completion", "created": self.created, "model": self.model,
            "choices": choices, "usage": generation.usage,
        }  # fmt: skip

    async def stream(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The same in pieces: events, several of them together where they come together."""
        usage = self.body.includes_usage
        writer = ChunkWriter("text_completion", self.answer_id, self.created, self.model, usage)
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
            choice["logprobs"] = completion_logprobs(self.tokenizer, update.logprobs, offsets[index])
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
