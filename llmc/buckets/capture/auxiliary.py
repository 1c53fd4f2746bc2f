"""Auxiliary graphs to warm up in addition to the buckets. Without this, the device would compile them during serving.

This module holds only strings and numbers; the warm-up runs them through the serving functions. The sampling programs
follow vLLM on Gaudi, which warms its sampler for each decode batch and each kind of sampling (vllm-gaudi's warm-up
documentation, log of September 2025: temperature, top_p and top_k, greedy and random).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from llmc.buckets.plan import Plan

Value = int | float | Mapping[int, float] | Mapping[str, str] | Sequence[int] | Sequence[str]

_PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}

SAMPLING: Mapping[str, Mapping[str, Value]] = MappingProxyType({
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top_k": {"temperature": 1.0, "top_k": 20},
    "top_p": {"temperature": 1.0, "top_p": 0.95},
    "top_k and top_p": {"temperature": 1.0, "top_k": 20, "top_p": 0.95},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "typical_p": {"temperature": 1.0, "typical_p": 0.9},
    "penalties": {"temperature": 1.0, **_PENALTIES},
    "penalties, greedy": {"temperature": 0.0, **_PENALTIES},
    "masks": {"temperature": 1.0, "min_tokens": 1, "allowed_token_ids": (0, 1), "bad_words": ("a",)},
    "logit_bias": {"temperature": 0.0, "logit_bias": {0: 1.0}},
    "logprobs": {"temperature": 0.0, "logprobs": 20},
    "seed": {"temperature": 1.0, "seed": 0},
    "structured output": {"temperature": 0.0, "structured_outputs": {"regex": "a"}},
})  # fmt: skip
"""Kinds of sampling by name: fields of SamplingParams, `structured_outputs` as those of StructuredOutputsParams."""


@dataclass(frozen=True)
class SampleStep:
    """Sample one token for each of `batch` rows, all with the parameters of SAMPLING[`kind`]."""

    batch: int
    kind: str


@dataclass(frozen=True)
class TopStep:
    """Fetch the `k` largest logits of `batch` rows in place of all."""

    batch: int
    k: int


@dataclass(frozen=True)
class CacheMove:
    """Copy, export and import a prefix of `length` cached tokens."""

    length: int


@dataclass(frozen=True)
class Auxiliary:
    """All auxiliary graphs to warm up after the buckets, largest first."""

    samples: tuple[SampleStep, ...]
    tops: tuple[TopStep, ...]
    moves: tuple[CacheMove, ...]

    def __len__(self) -> int:
        return len(self.samples) + len(self.tops) + len(self.moves)


def auxiliary(plan: Plan, sample_top_k: int = 0) -> Auxiliary:
    """Return the auxiliary graphs that a plan's buckets need.

    Every kind of sampling is warmed at every decode batch; a prompt's first token is sampled at the smallest batch that
    holds it. With `sample_top_k`, graphs return that many logits, fetched for the batches of both phases. Prefixes are
    moved at each context of the plan.
    """
    decode = sorted({bucket.batch for bucket in plan.decode}, reverse=True)
    every = sorted({bucket.batch for bucket in plan.buckets}, reverse=True) if sample_top_k else []
    contexts = sorted({bucket.context for bucket in plan.buckets if bucket.context}, reverse=True)
    return Auxiliary(
        tuple(SampleStep(batch, kind) for batch in decode for kind in SAMPLING),
        tuple(TopStep(batch, sample_top_k) for batch in every),
        tuple(CacheMove(min(context, plan.limits.longest_past)) for context in contexts),
    )
