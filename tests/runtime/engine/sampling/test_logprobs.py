"""Log probabilities: of the raw logits, in float64, against the definition."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llmc.runtime.engine.sampling.batch import sample
from tests.runtime.engine.sampling.reference import logits, sampler


def log_softmax(row):
    row = row.astype(np.float64)
    return row - row.max() - math.log(np.exp(row - row.max()).sum())


@pytest.mark.parametrize("vocab", [40, 257, 5000, 49152])
@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_they_are_those_of_the_softmax(vocab, count):
    rows = logits(3, vocab, seed=count)
    built = [sampler(vocab=vocab, logprobs=count, seed=i, temperature=2.0) for i in range(3)]
    for row, token, found in zip(rows, *_parts(sample(rows, built)), strict=True):
        expected = log_softmax(row)
        assert found.token_id == token and found.logprob == pytest.approx(expected[token], abs=1e-5)
        assert found.rank == 1 + int((row > row[token]).sum())
        order = np.argsort(-row, kind="stable")[:count].tolist()
        assert [i for i, _ in found.top] == order
        assert [p for _, p in found.top] == pytest.approx(expected[order].tolist(), abs=1e-5)


def _parts(samples):
    return samples.ids, samples.logprobs


def test_they_ignore_penalties_masks_and_temperature():
    rows = logits(1, 300)
    plain = sample(rows, [sampler(vocab=300, temperature=0, logprobs=20)]).logprobs[0]
    other = sampler(vocab=300, temperature=0.3, logprobs=20, prompt=[1], repetition_penalty=2.0, top_k=2, seed=0,
                    allowed_token_ids=[5, 6], logit_bias={5: 90})  # fmt: skip
    found = sample(rows, [other]).logprobs[0]
    assert found.token_id == 5 and found.top == plain.top
    assert found.logprob == pytest.approx(log_softmax(rows[0])[5], abs=1e-5)


def test_equals_share_a_rank_and_are_listed_by_id():
    rows = np.zeros((1, 50), np.float32)
    rows[0, [7, 30]] = 1.0
    found = sample(rows, [sampler(vocab=50, temperature=0, logprobs=4)]).logprobs[0]
    assert (found.token_id, found.rank) == (7, 1) and [i for i, _ in found.top] == [7, 30, 0, 1]
    low = sample(rows, [sampler(vocab=50, temperature=0, logprobs=1, allowed_token_ids=[49])]).logprobs[0]
    assert low.rank == 3


def test_only_the_rows_that_ask_get_them():
    rows = logits(3)
    built = [sampler(temperature=0, logprobs=n) for n in (None, 0, 2)]
    found = sample(rows, built).logprobs
    assert found[0] is None and found[1].top == () and len(found[2].top) == 2
    assert all(type(x) in (int, float) for pair in found[2].top for x in pair)


def test_a_small_vocabulary_has_no_more_than_itself():
    found = sample(logits(1, 5), [sampler(vocab=5, temperature=0, logprobs=20)]).logprobs[0]
    assert len(found.top) == 5 and sum(math.exp(p) for _, p in found.top) == pytest.approx(1)


def test_what_is_impossible_has_minus_infinity():
    rows = np.array([[0.0, -np.inf, 1.0]], np.float32)
    found = sample(rows, [sampler(vocab=3, temperature=0, logprobs=3)]).logprobs[0]
    assert found.top[2] == (1, -math.inf)
