"""Requests per second of a server that is always busy, in closed form: equal requests, full decode batches.

A request of p prompt and o output tokens takes a device T_prompt = prompt(p) for its prompt, and T_decode = (o − 1) ·
decode(slots) / slots of its decode steps, at p + o / 2 tokens. h is the time to move its keys and values, in seconds.

    alone            1 / (T_prompt + T_decode)
    disaggregated, apart    1 / max(T_prompt + h / 2, T_decode + h / 2)     the slower stage limits, the other waits
    disaggregated, shared   1 / (2 c · shorter + longer − shorter)          of the same two; c: Sharing.contention

With a contention of 1, that is the sum of both: one machine does all the work, plus the transfer. On shared cores,
disaggregation therefore pays only where each device is the better one for its own half.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmc.buckets.disaggregated.device import Link, Sharing, Stage


@dataclass(frozen=True)
class Steady:
    """Requests per second of each device alone, and of both."""

    prefill_alone: float
    decode_alone: float
    disaggregated: float

    @property
    def better(self) -> float:
        """Requests per second of the better single device."""
        return max(self.prefill_alone, self.decode_alone)

    @property
    def gain(self) -> float:
        """Both devices relative to the better single device; disaggregation pays above 1."""
        return self.disaggregated / self.better


def steady(
    prefill: Stage, decode: Stage, link: Link, prompt: int, output: int, slots: int, sharing: Sharing
) -> Steady:  # fmt: skip
    """Return the rates for requests of `prompt` and `output` tokens (at least 1 each), `slots` of them at once."""
    first, rest = prefill.prompt_s(prompt), _decode_s(decode, prompt, output, slots)
    moving = link.moving_s(prompt)
    if sharing.shared:
        seconds = _shared(first + moving / 2, rest + moving / 2, sharing)
    else:
        seconds = max(first, rest) + moving / 2
    return Steady(
        1 / (first + _decode_s(prefill, prompt, output, slots)), 1 / (decode.prompt_s(prompt) + rest), 1 / seconds
    )


def _decode_s(stage: Stage, prompt: int, output: int, slots: int) -> float:
    if output < 2:
        return 0.0
    context = prompt + output // 2
    return (output - 1) * stage.decode_s(slots, context, slots * context) / slots


def _shared(first: float, rest: float, sharing: Sharing) -> float:
    """Seconds of one machine for both: the shorter runs concurrently with the longer, which then continues alone."""
    shorter, longer = sorted((first, rest))
    return shorter / sharing.speed + (longer - shorter)


@dataclass(frozen=True)
class BreakEven:
    """Prompt lengths, in tokens, for which disaggregation pays at `output` tokens.

    `least` and `most` bound the range among the tested lengths, None where it never pays; `best` has the largest gain,
    `gain`.
    """

    output: int
    least: int | None
    most: int | None
    best: int
    gain: float


def break_even(
    prefill: Stage, decode: Stage, link: Link, slots: int, sharing: Sharing, longest: int
) -> list[BreakEven]:  # fmt: skip
    """Return the break-even for outputs of 16 tokens and each four times as many, over prompts that are powers of two.

    Prompt and output together have at most `longest` tokens.
    """
    found = []
    for output in _powers(16, longest // 2, 4):
        gains = {
            prompt: steady(prefill, decode, link, prompt, output, slots, sharing).gain
            for prompt in _powers(16, longest - output, 2)
        }
        if not gains:
            continue
        paying = [prompt for prompt, gain in gains.items() if gain > 1]
        best = max(gains, key=gains.__getitem__)
        found.append(
            BreakEven(output, min(paying, default=None), max(paying, default=None), best, round(gains[best], 4))
        )
    return found


def _powers(least: int, most: int, factor: int) -> Iterator[int]:
    while least <= most:
        yield least
        least *= factor
