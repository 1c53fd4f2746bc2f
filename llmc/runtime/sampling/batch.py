"""One token for each row of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from llmc.runtime.requests import TokenLogprobs
from llmc.runtime.sampling.filters import Logits
from llmc.runtime.sampling.logprobs import token_logprobs
from llmc.runtime.sampling.sequence import SequenceSampler, check_largest
from llmc.runtime.sampling.top import TopLogits


@dataclass(frozen=True, slots=True)
class Samples:
    """The token chosen for each row, and its log probabilities where the row's request asks for them."""

    ids: list[int]
    logprobs: list[TokenLogprobs | None]


def sample(logits: Logits, samplers: Sequence[SequenceSampler]) -> Samples:
    """One token a row, recorded in its sampler.

    `logits` [B, V] float32 are only read; row i belongs to samplers[i]. When every row is plainly greedy this is one
    argmax. Rows are independent: a row's token is bitwise the same in any batch. Raises VerificationError where
    a row's largest logit is not finite.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # beyond float32 is as good as never
        if all(sampler.plain for sampler in samplers):
            ids = _greedy(logits)
        else:
            ids = [sampler.choose(row, sampler.uniform()) for sampler, row in zip(samplers, logits, strict=True)]
        return _recorded(Samples(ids, _logprobs(logits, samplers, ids)), samplers)


def sample_top(top: TopLogits, samplers: Sequence[SequenceSampler], full: Callable[[], Logits]) -> Samples:
    """As `sample(full(), samplers)`, bit by bit, from the largest logits alone where they are enough.

    `full` gives all logits [B, V] of the same rows, and is called at most once: where a sampler is not served by the
    K largest, where min_p keeps more than these, and where the largest is not finite.
    """
    uniforms = [sampler.uniform() for sampler in samplers]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        found = [
            sampler.choose_among(values, top_ids, uniform) if sampler.served_by_top(top.count) else None
            for sampler, values, top_ids, uniform in zip(samplers, top.values, top.ids, uniforms, strict=True)
        ]
        if None not in found:
            ids = [token_id for token_id in found if token_id is not None]
            return _recorded(Samples(ids, [None] * len(ids)), samplers)
        logits = full()
        ids = [
            sampler.choose(row, uniform) if token_id is None else token_id
            for sampler, row, uniform, token_id in zip(samplers, logits, uniforms, found, strict=True)
        ]
        return _recorded(Samples(ids, _logprobs(logits, samplers, ids)), samplers)


def _greedy(logits: Logits) -> list[int]:
    ids = logits.argmax(axis=1)
    for largest in logits[np.arange(ids.size), ids].tolist():
        check_largest(largest)
    found: list[int] = ids.tolist()
    return found


def _logprobs(logits: Logits, samplers: Sequence[SequenceSampler], ids: Sequence[int]) -> list[TokenLogprobs | None]:
    return [
        None if sampler.logprobs is None else token_logprobs(row, token_id, sampler.logprobs)
        for sampler, row, token_id in zip(samplers, logits, ids, strict=True)
    ]


def _recorded(samples: Samples, samplers: Sequence[SequenceSampler]) -> Samples:
    for sampler, token_id in zip(samplers, samples.ids, strict=True):
        sampler.record(token_id)
    return samples
