"""Samples one token per row of a batch, with its log probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from llmc.errors import VerificationError
from llmc.runtime.engine.sampling.filters import Logits, LogitsRow
from llmc.runtime.engine.sampling.sampler import SequenceSampler, check_largest
from llmc.runtime.top_logits import TopLogits

Samplers = Sequence[SequenceSampler | None]
"""The sampler of each row; None if nobody waits for the row's token."""

Take = Callable[[int, int | None, "TokenLogprobs | None"], bool]
"""Called with (row index, token, its log probabilities); returns whether the sequence continues. The token is None for
a row whose sequence failed (`SequenceSampler.failure`), also if it was not to emit yet.
"""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position, from the raw logits, in nats.

    Holds the chosen token's, its rank (1: the most probable), and those of the most probable tokens, best first, as
    (id, logprob).
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Samples:
    """The token chosen for each row, and its log probabilities if requested.

    None for a row whose sequence cannot continue; the sampler's `failure` says why.
    """

    ids: list[int | None]
    logprobs: list[TokenLogprobs | None]


def sample(logits: Logits, samplers: Sequence[SequenceSampler]) -> Samples:
    """Sample one token per row and record it in its sampler.

    `logits` [B, V] float32 are not modified; row i belongs to samplers[i]. If every row is plainly greedy, this is one
    argmax. Rows are independent: a row's token is bitwise equal in any batch, and a failure, such as NaN logits,
    affects only its row.
    """
    # a value beyond float32 counts as minus infinity
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if all(sampler.plain for sampler in samplers):
            ids = _greedy(logits, samplers)
        else:
            ids = [_chosen(sampler, row, sampler.uniform()) for sampler, row in zip(samplers, logits, strict=True)]
        return _recorded(Samples(ids, _logprobs(logits, samplers, ids)), samplers)


def sample_top(top: TopLogits, samplers: Sequence[SequenceSampler], full: Callable[[], Logits]) -> Samples:
    """Return the bitwise result of `sample(full(), samplers)`, using only the largest logits if they suffice.

    `full` returns all logits [B, V] of the same rows and is called at most once: if a sampler is not served by the K
    largest, min_p keeps more than these, or one of them is not finite.
    """
    uniforms = [sampler.uniform() for sampler in samplers]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        sound = cast("list[bool]", np.isfinite(top.values).all(axis=1).tolist())
        found = [
            sampler.choose_among(values, top_ids, uniform) if ok and sampler.served_by_top(top.count) else None
            for sampler, values, top_ids, uniform, ok in zip(
                samplers, top.values, top.ids, uniforms, sound, strict=True
            )
        ]
        if None not in found:
            return _recorded(Samples(found, [None] * len(found)), samplers)
        logits = full()
        ids = [
            _chosen(sampler, row, uniform) if token_id is None else token_id
            for sampler, row, uniform, token_id in zip(samplers, logits, uniforms, found, strict=True)
        ]
        return _recorded(Samples(ids, _logprobs(logits, samplers, ids)), samplers)


def finite(logits: Logits, sampler: SequenceSampler) -> bool:
    """Whether a row's largest logit is finite and no logit is NaN; otherwise its sequence fails."""
    try:
        check_largest(float(logits.max()))
    except VerificationError as error:
        sampler.fail(error)
        return False
    return True


def _greedy(logits: Logits, samplers: Sequence[SequenceSampler]) -> list[int | None]:
    ids = logits.argmax(axis=1)
    found: list[int | None] = ids.tolist()
    if not np.isfinite(logits[np.arange(ids.size), ids]).all():
        for i, sampler in enumerate(samplers):
            if not finite(logits[i], sampler):
                found[i] = None
    return found


def _chosen(sampler: SequenceSampler, row: Logits, uniform: float) -> int | None:
    try:
        return sampler.choose(row, uniform)
    except Exception as error:  # noqa: BLE001 - any error concerns only this row
        sampler.fail(error)
    return None


def _logprobs(
    logits: Logits, samplers: Sequence[SequenceSampler], ids: Sequence[int | None]
) -> list[TokenLogprobs | None]:  # fmt: skip
    return [
        None if sampler.logprobs is None or token_id is None else token_logprobs(row, token_id, sampler.logprobs)
        for sampler, row, token_id in zip(samplers, logits, ids, strict=True)
    ]


def _recorded(samples: Samples, samplers: Sequence[SequenceSampler]) -> Samples:
    for sampler, token_id in zip(samplers, samples.ids, strict=True):
        if token_id is not None:
            try:
                sampler.record(token_id)
            except Exception as error:  # noqa: BLE001 - as above: a constraint's failure
                sampler.fail(error)
    return samples


def token_logprobs(values: Logits, token_id: int, count: int) -> TokenLogprobs:
    """Log probabilities of `token_id` and of the `count` most probable ids: softmax of logits [V] at temperature 1.

    Like vLLM's `raw_logprobs`, before penalties, masks and temperature. The rank is 1 + the number of larger logits;
    the sum is float64. Ties are ordered by lower id.
    """
    row = LogitsRow(values)
    largest = row.largest
    weights = np.exp(values - largest)
    normaliser = float(largest) + math.log(float(weights.sum(dtype=np.float64)))
    chosen = values[token_id]
    rank = 1 + int(np.count_nonzero(values > chosen))
    top: tuple[tuple[int, float], ...] = ()
    if count:
        ids = row.top(min(count, values.size))
        ids = ids[np.argsort(-values[ids], kind="stable")]
        top = tuple((i, v - normaliser) for i, v in zip(ids.tolist(), values[ids].tolist(), strict=True))
    return TokenLogprobs(token_id, float(chosen) - normaliser, rank, top)
