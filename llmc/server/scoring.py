"""Completions that repeat the prompt with the log probabilities of its tokens, or that generate nothing.

Compiled graphs return the logits of the last token only. Therefore the prompt's first token is the engine's prompt, and
the others are the output's first tokens, in place of chosen ones: one decode step for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llmc.server.generation import Answer, Generation
from llmc.server.protocol.logprobs import completion_logprobs

if TYPE_CHECKING:
    from llmc.runtime.engine.sampling.params import SamplingParams
    from llmc.server.protocol.completions import CompletionRequest
    from llmc.server.state import Served


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
        """Return the choices and the usage.

        Raises InputError, OverloadedError or EngineDeadError where the engine takes no request.
        """
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
