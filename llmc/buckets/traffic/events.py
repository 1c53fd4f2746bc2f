"""Types between a trace and a plan: requests, and the steps that serve them.

    trace file ──reader──► TrafficRequest ──admission──► TrafficRequest ──schedule──► PromptGroup, DecodeRun

Everything streams: a trace of any size is read, scheduled and counted in bounded memory.
"""

from __future__ import annotations

from typing import NamedTuple


class TrafficRequest(NamedTuple):
    """One request of a trace.

    `time` is its arrival in seconds from the first request of the trace, and never decreases. The first `cached` of the
    `prompt` tokens (fewer than `prompt`) were already in the cache; `output` tokens were generated, at least 1.
    """

    time: float
    prompt: int
    output: int
    cached: int = 0


class PromptGroup(NamedTuple):
    """Prompts that are admitted together: request i has `lengths[i]` tokens, the first `cached[i]` in the cache."""

    lengths: tuple[int, ...]
    cached: tuple[int, ...]


class DecodeRun(NamedTuple):
    """`steps` consecutive decode steps of the same `batch` sequences, each of which grows by one token per step.

    At the first step the longest sequence has `longest` tokens in the cache, and all of them together `total`; at step
    t (from 0) these are longest + t and total + batch · t.
    """

    batch: int
    longest: int
    total: int
    steps: int
