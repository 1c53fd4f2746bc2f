"""What a comparison measures, and how much of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from llmc.buckets.limits import Limits
from llmc.buckets.traffic.admission import Admission
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.reader import Trace
from llmc.errors import InputError, UnknownNameError

KINDS = ("quality", "decode", "prefill", "first-token", "memory", "streams", "trace")
"""Measurements, in the order in which they run; `trace` wants a trace."""


@dataclass(frozen=True)
class Scope:
    """Tokens and counts; every round but the first, which warms, counts.

    decode: `steps` steps after prompts of `decode_prompt` tokens, at each of `batches`. prefill: of each of `prompts`
    tokens. first-token: `question`, from starting a process on. memory and streams: `streams` answers at a time of
    `stream_tokens` tokens to prompts of `stream_prompt`. trace: in each round `requests` further requests of the file
    `trace`, lengths times `scale`, cut to `max_len` tokens, `concurrency` at a time. `tune`: search the baselines'
    settings first (tuning.py).
    """

    kinds: tuple[str, ...] = KINDS[:-1]
    rounds: int = 5
    batches: tuple[int, ...] = (1, 4, 8, 16)
    decode_prompt: int = 64
    steps: int = 32
    prompts: tuple[int, ...] = (512, 2048)
    question: str = "What is gravity?"
    first_token_rounds: int = 10
    streams: tuple[int, ...] = (1, 8)
    stream_prompt: int = 64
    stream_tokens: int = 64
    memory_streams: int = 8
    memory_prompt: int = 256
    trace: Path | None = None
    trace_rounds: int = 3
    requests: int = 64
    scale: float = 0.125
    max_len: int = 1024
    concurrency: int = 8
    tune: bool = True

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in KINDS:
                raise UnknownNameError("measurement", kind, KINDS)
        if "trace" in self.kinds and self.trace is None:
            raise InputError("the measurement 'trace' needs a file of request lengths: --traffic FILE")

    def quick(self) -> Scope:
        """The same measurements with few rounds and the baselines' own defaults, for a first look: nothing to
        publish."""
        return replace(
            self, rounds=2, steps=12, first_token_rounds=3, trace_rounds=1, requests=min(24, self.requests),
            stream_tokens=32, tune=False,
        )  # fmt: skip

    def only(self, names: str) -> Scope:
        """Some of the measurements, from a comma-separated text; raises InputError for others."""
        return replace(self, kinds=tuple(name.strip() for name in names.split(",")))

    def recorded(self) -> list[tuple[int, int]]:
        """Tokens of the prompts and answers of all rounds of the trace."""
        return recorded(self.trace, self.requests * self.trace_rounds, self.scale, self.max_len)


def recorded(path: Path, count: int, scale: float, max_len: int) -> list[tuple[int, int]]:
    """Tokens of the prompt and the answer of the first `count` requests of a trace that fit.

    Lengths are multiplied by `scale`, to whole tokens and at least 1, and cut to `max_len` as planning does. Raises
    InputError for a trace that cannot be read or has too few requests.
    """
    scaled = (
        TrafficRequest(time, max(1, round(prompt * scale)), max(1, round(output * scale)))
        for time, prompt, output, _ in Trace(path)
    )
    admitted = Admission(Limits(max_len, 1), clip=True)(scaled)
    found = [(request.prompt, request.output) for request in islice(admitted, count)]
    if len(found) < count:
        raise InputError(f"{path} has {len(found)} requests, and {count} are asked for")
    return found
