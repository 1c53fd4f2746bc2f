"""A request as the engine takes it, and what comes back of it, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmc.runtime.engine.observer import FinishReason

if TYPE_CHECKING:
    from llmc.errors import LlmcError
    from llmc.runtime.engine.handover import HandOver
    from llmc.runtime.engine.sampling.logprobs import TokenLogprobs
    from llmc.runtime.engine.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt as token ids, and how to continue it. `request_id` is unique among requests that run.

    `end_ids` are the model's end tokens; lower `priority` goes first. `adapter`: which of the bundle's adapters it gets
    (`Bundle.adapter`), 0 for none.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    end_ids: Sequence[int] = ()
    priority: int = 0
    adapter: int = 0


@dataclass(frozen=True, slots=True)
class Update:
    """News of choice `index` (0 … n − 1) of a request: what was added since the last update.

    `text` is text that is certain now; `token_ids` and `logprobs` (empty unless asked for) may run ahead of it, since
    a token may hold part of a character or of a stop string. `finish_reason` is set on the last update of the choice;
    `stop_reason` then is the stop string or stop token id that was met, if one was. A request is over when each of its
    n choices is. `handover` comes with the first update of a request whose prompt another executor computed.
    `error` is what the device failed with, where the reason is "error" and that is known.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    handover: HandOver | None = None
    error: LlmcError | None = None
