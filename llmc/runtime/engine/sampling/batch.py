"""One token for each row of a batch, and its log probabilities."""

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
"""The sampler of each row; None where nobody waits for the row's token any more."""

Take = Callable[[int, int | None, "TokenLogprobs | None"], bool]
"""Called with (index of the row, token, its log probabilities); whether the sequence goes on. The token is None for a
row whose sequence failed (`SequenceSampler.failure`), also one that was to give no token yet."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one place, of the raw logits: the chosen token's, its rank (1: the most probable), and the
    most probable tokens', best first, as (id, logprob). Nats."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Samples:
    """The token chosen for each row, and its log probabilities where the row's request asks for them.

    None for a row that has no token: its sequence cannot go on, and the sampler's `failure` says why.
    """

    ids: list[int | None]
    logprobs: list[TokenLogprobs | None]


def sample(logits: Logits, samplers: Sequence[SequenceSampler]) -> Samples:
    """One token a row, recorded in its sampler.

    `logits` [B, V] float32 are only read; row i belongs to samplers[i]. When every row is plainly greedy this is one
    argmax. Rows are independent: a row's token is bitwise the same in any batch, and what fails in one, such as logits
    that are no numbers, is that row's failure alone.
    """
    # a value beyond float32 counts as minus infinity
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if all(sampler.plain for sampler in samplers):
            ids = _greedy(logits, samplers)
        else:
            ids = [_chosen(sampler, row, sampler.uniform()) for sampler, row in zip(samplers, logits, strict=True)]
        return _recorded(Samples(ids, _logprobs(logits, samplers, ids)), samplers)


def sample_top(top: TopLogits, samplers: Sequence[SequenceSampler], full: Callable[[], Logits]) -> Samples:
    """As `sample(full(), samplers)`, bit by bit, from the largest logits alone where they are enough.

    `full` gives all logits [B, V] of the same rows, and is called at most once: where a sampler is not served by the
    K largest, where min_p keeps more than these, and where one of them is not finite.
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
    """Whether a row's largest logit is finite and no logit is NaN; if not, its sequence fails."""
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
    except Exception as error:  # noqa: BLE001 - whatever it is, it is of this row alone
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
    """Of `token_id` and the `count` most probable ids, by the softmax of logits [V] at temperature 1.

    As vLLM's `raw_logprobs`: before penalties, masks and temperature. The rank is 1 + the number of larger logits; the
    sum is float64. Of equally probable ids the lower go first.
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
