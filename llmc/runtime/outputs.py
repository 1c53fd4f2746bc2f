"""What generation returns; the names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmc.runtime.engine import FinishReason, StepRecord


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since the call: to the first token, and to the last."""

    first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt with its continuation; `steps` is filled when step records were asked for."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    timings: Timings
    steps: list[StepRecord] = field(default_factory=list)
