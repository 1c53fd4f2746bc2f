"""The engine's requests, their incremental updates, and the outputs built from these, with vLLM's names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.errors import LlmcError
    from llmc.runtime.engine.kv_transfer import KVTransfer
    from llmc.runtime.engine.observer import FinishReason, StepRecord
    from llmc.runtime.engine.sampling.batch import TokenLogprobs
    from llmc.runtime.engine.sampling.params import SamplingParams
    from llmc.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt as token ids, with its parameters. `request_id` is unique among running requests.

    `end_ids` are the model's end tokens; lower `priority` goes first. `adapter` is the bundle's adapter number
    (`Bundle.adapter`), 0 for none. `trace_headers` is the caller's W3C trace context (traceparent, tracestate).
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    end_ids: Sequence[int] = ()
    priority: int = 0
    adapter: int = 0
    trace_headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Update:
    """What was added to choice `index` (0 … n − 1) of a request since the last update.

    `text` is final. `token_ids` and `logprobs` (empty unless requested) may run ahead of it, because a token may hold
    part of a character or of a stop string. `finish_reason` is set on the choice's last update, with `stop_reason`, the
    stop string or stop token id that was met, if any. A request is over when all n choices are. `kv_transfer` comes
    with the first update if another executor computed the prompt. `error` is the device's error, if known, when the
    reason is "error".
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    kv_transfer: KVTransfer | None = None
    error: LlmcError | None = None


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log probability in nats, its rank (1: the most probable), and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One continuation. `logprobs` has a dictionary by token id for each token, if requested."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None

    def finished(self) -> bool:
        """Whether the continuation is finished."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds from the call to the first and last token, and the prompt's KV transfer cost, if any."""

    first_token_s: float
    total_s: float
    kv_transfer: KVTransfer | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt with its continuations; `steps` is filled if step records were requested."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    timings: Timings
    steps: list[StepRecord] = field(default_factory=list)
    request_id: str = ""
    finished: bool = True
    num_cached_tokens: int = 0


class OutputBuilder:
    """Collects a request's updates into its output."""

    def __init__(
        self, request: Request, prompt: str | None, token_text: Callable[[int], str] | None = None,
        started_s: float | None = None,
    ) -> None:  # fmt: skip
        """`token_text` gives a token's text for logprobs; `started_s` is time.perf_counter() at the call."""
        self._token_text = token_text
        self._started = time.perf_counter() if started_s is None else started_s
        wanted = request.params.logprobs is not None
        self.output = RequestOutput(
            prompt, list(request.prompt_token_ids),
            [CompletionOutput(i, "", [], logprobs=[] if wanted else None) for i in range(request.params.n)],
            Timings(0.0, 0.0), request_id=request.request_id, finished=False,
        )  # fmt: skip

    def take(self, update: Update) -> None:
        """Add one update."""
        output, elapsed = self.output, time.perf_counter() - self._started
        output.timings = Timings(
            output.timings.first_token_s or elapsed, elapsed, update.kv_transfer or output.timings.kv_transfer
        )
        output.num_cached_tokens = update.cached_tokens
        choice = output.outputs[update.index]
        choice.text += update.text
        choice.token_ids.extend(update.token_ids)
        self._take_logprobs(choice, update.logprobs)
        if update.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = update.finish_reason, update.stop_reason
            output.finished = all(c.finish_reason is not None for c in output.outputs)

    def _take_logprobs(self, choice: CompletionOutput, logprobs: Iterable[TokenLogprobs]) -> None:
        for one in logprobs:
            if choice.logprobs is None:
                return
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + one.logprob
            entry = {one.token_id: Logprob(one.logprob, one.rank, self._text(one.token_id))}
            for rank, (token, logprob) in enumerate(one.top, 1):
                entry.setdefault(token, Logprob(logprob, rank, self._text(token)))
            choice.logprobs.append(entry)

    def _text(self, token: int) -> str | None:
        return None if self._token_text is None else self._token_text(token)


def text_of(tokenizer: Tokenizer | None) -> Callable[[int], str] | None:
    """A function that returns a single token's text, or None without a tokenizer."""
    if tokenizer is None:
        return None

    def text(token: int) -> str:
        alone = tokenizer.decode([token], skip_special_tokens=False)
        behind = tokenizer.decode([token, token], skip_special_tokens=False)  # not as the first word of a text
        return behind[len(alone) :] if behind.startswith(alone) else alone

    return text
