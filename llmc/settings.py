"""Everything llmc reads from the environment; no other module touches `os.environ`.

Variables
    LLMC_CACHE_DIR   folder of the artifact store; default: the platform's user cache folder for "llmc"
    LLMC_THREADS     threads that compiling and running may use, at least 1; default: the CPUs this process
                     may use
    VLLM_BUCKETING_STRATEGY     lin | exp | pad
    VLLM_BUCKETING_FROM_FILE    a bucket file
    VLLM_{PROMPT|DECODE}_{BS|QUERY|SEQ|CTX|BLOCK}_BUCKET_{MIN|STEP|MAX}    one number of one bucket range

A variable set to the empty string counts as unset. Only the standard library is imported here, and only its
light parts, because every command pays for this module.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmc.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

STRATEGY_SPELLINGS = {"lin": "linear", "exp": "exponential", "pad": "padding-aware"}
"""VLLM_BUCKETING_STRATEGY value → the strategy's name here."""

BOUNDS = ("min", "step", "max")
PARAMETERS = (*BOUNDS, "limit", "pad_max", "pad_percent")
"""The numbers of one bucket range, as named in VLLM_*_BUCKET_{MIN|…}; the last three belong to one rule each."""

# (dimension, spellings from newest to oldest, as (name between phase and _BUCKET_, counted in blocks?))
_SPELLINGS: tuple[tuple[str, tuple[tuple[str, bool], ...]], ...] = (
    ("prompt_batch", (("PROMPT_BS", False),)),
    ("prompt_query", (("PROMPT_QUERY", False), ("PROMPT_SEQ", False))),
    ("prompt_context", (("PROMPT_CTX", True), ("PROMPT_BLOCK", True))),
    ("decode_batch", (("DECODE_BS", False),)),
    ("decode_context", (("DECODE_CTX", True), ("DECODE_BLOCK", True), ("DECODE_SEQ", False))),
)


@dataclass(frozen=True)
class BucketNumber:
    """One number of a bucket range as the environment gives it.

    `blocks` is true when `value` counts KV cache blocks (of `block_size` tokens) and not tokens.
    """

    value: int
    variable: str
    blocks: bool = False

    def in_tokens(self, block_size: int) -> int:
        """The value in tokens (or sequences, for a batch)."""
        return self.value * block_size if self.blocks else self.value


@dataclass(frozen=True)
class Settings:
    """What the environment asks for; build it once, with `from_environment`, and pass it down.

    `bucket_numbers` maps (dimension, bound), for example ("prompt_batch", "max"), to the number set for it.
    `warnings` are sentences for the user about variables that are overruled or not understood.
    """

    cache_override: str | None = None
    threads_override: int | None = None
    strategy: str | None = None
    bucket_file: str | None = None
    bucket_numbers: Mapping[tuple[str, str], BucketNumber] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read every variable this module documents.

        Raises InputError, naming the variable and its value, for a number that is not an integer, a thread
        count below 1, or a strategy that is not one of `STRATEGY_SPELLINGS`.
        """
        warnings: list[str] = []
        numbers = _bucket_numbers(environ, warnings)
        return cls(
            cache_override=environ.get("LLMC_CACHE_DIR") or None,
            threads_override=_threads(environ),
            strategy=_strategy(environ),
            bucket_file=environ.get("VLLM_BUCKETING_FROM_FILE") or None,
            bucket_numbers=numbers,
            warnings=tuple(warnings),
        )

    @property
    def cache_dir(self) -> Path:
        """The artifact store's folder; it may not exist yet."""
        from pathlib import Path

        if self.cache_override is not None:
            return Path(self.cache_override).expanduser()
        from platformdirs import user_cache_dir

        return Path(user_cache_dir("llmc"))

    @property
    def threads(self) -> int:
        """Threads to use, at least 1: LLMC_THREADS, or else the CPUs this process is allowed to run on."""
        if self.threads_override is not None:
            return self.threads_override
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1


def _integer(environ: Mapping[str, str], variable: str) -> int | None:
    text = environ.get(variable, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{variable}={text!r} is not an integer; set a whole number or unset it") from None


def _threads(environ: Mapping[str, str]) -> int | None:
    threads = _integer(environ, "LLMC_THREADS")
    if threads is not None and threads < 1:
        raise InputError(f"LLMC_THREADS={threads} must be at least 1; unset it to use every usable CPU")
    return threads


def _strategy(environ: Mapping[str, str]) -> str | None:
    spelling = environ.get("VLLM_BUCKETING_STRATEGY", "").strip()
    if not spelling:
        return None
    try:
        return STRATEGY_SPELLINGS[spelling]
    except KeyError:
        known = ", ".join(STRATEGY_SPELLINGS)
        raise InputError(f"VLLM_BUCKETING_STRATEGY={spelling!r} is not one of {known}") from None


def _bucket_numbers(environ: Mapping[str, str], warnings: list[str]) -> dict[tuple[str, str], BucketNumber]:
    numbers: dict[tuple[str, str], BucketNumber] = {}
    understood: set[str] = set()
    for dimension, spellings in _SPELLINGS:
        for bound in BOUNDS:
            for name, blocks in spellings:
                variable = f"VLLM_{name}_BUCKET_{bound.upper()}"
                understood.add(variable)
                value = _integer(environ, variable)
                if value is None:
                    continue
                winner = numbers.setdefault((dimension, bound), BucketNumber(value, variable, blocks))
                if winner.variable != variable:
                    warnings.append(f"{variable} is ignored: {winner.variable} is set, and is its newer spelling")
    for variable in sorted(set(environ) - understood):
        if variable.startswith(("VLLM_PROMPT_", "VLLM_DECODE_")) and "_BUCKET_" in variable:
            warnings.append(f"{variable} is ignored: llmc plans nothing from it")
    return numbers
