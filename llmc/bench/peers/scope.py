"""What a comparison measures, and how much of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from llmc.errors import InputError, UnknownNameError

KINDS = ("quality", "decode", "prefill", "first-token", "memory", "streams", "trace")
"""Measurements, in the order in which they run; `trace` wants a trace."""


@dataclass(frozen=True)
class Scope:
    """Tokens and counts; every round but the first, which warms, counts.

    decode: `steps` steps after prompts of `decode_prompt` tokens, at each of `batches`. prefill: of each of `prompts`
    tokens. first-token: `question`, from starting a process on. memory and streams: `streams` answers at a time of
    `stream_tokens` tokens to prompts of `stream_prompt`. trace: in each round `requests` further requests of the file
    `trace`, lengths times `scale`, cut to `max_len` tokens, `concurrency` at a time. `tune`: search the peers' settings
    first (tuning.py).
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
        """The same measurements with few rounds and the peers' own defaults, for a first look: nothing to publish."""
        return replace(
            self, rounds=2, steps=12, first_token_rounds=3, trace_rounds=1, requests=min(24, self.requests),
            stream_tokens=32, tune=False,
        )  # fmt: skip

    def only(self, names: str) -> Scope:
        """Some of the measurements, from a comma-separated text; raises InputError for others."""
        return replace(self, kinds=tuple(name.strip() for name in names.split(",")))
