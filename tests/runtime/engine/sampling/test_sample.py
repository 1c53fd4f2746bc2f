"""Choosing tokens: filters against a plain reference, ties, penalties, masks, determinism, speed."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from llmc.errors import InputError
from llmc.runtime.engine.sampling.batch import sample
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.engine.sampling.sampler import SequenceSampler, bad_word_ids
from tests.runtime.engine.sampling.reference import VOCAB, logits, penalised, sampler, support
from tests.tiers import default_cases, examples

PROPERTY = examples(200, database=None, derandomize=True)


def draw(row, one) -> int:
    """One token by logits [V]."""
    return sample(row[None], [one]).ids[0]


@pytest.mark.parametrize("params", [{"stop_token_ids": [VOCAB]}, {"logit_bias": {VOCAB: 1.0}}, {"end": [VOCAB]},
                                    {"allowed_token_ids": [3, VOCAB]}, {"prompt": [VOCAB]}])  # fmt: skip
def test_ids_beyond_the_vocabulary_are_refused(params):
    with pytest.raises(InputError, match="token id 1000 is not below the vocabulary size 1000"):
        sampler(**params)


# Greedy


def test_greedy_takes_the_largest_and_the_lower_of_equals():
    rows = logits(3)
    rows[1, [5, 9]] = 50.0
    samples = sample(rows, [sampler(temperature=0) for _ in range(3)])
    assert samples.ids == [int(rows[0].argmax()), 5, int(rows[2].argmax())] and samples.logprobs == [None] * 3
    assert all(type(i) is int for i in samples.ids)


@pytest.mark.parametrize(
    "params",
    [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 0}, {"temperature": 1.1e-5}, {"typical_p": 1e-9}],
)
def test_narrowest_filters_agree_with_greedy(params):
    rows = logits(20, seed=3)
    if "typical_p" in params:
        rows[np.arange(20), rows.argmax(axis=1)] += 40  # where the most probable token is what one expects
    assert sample(rows, [sampler(**params) for _ in rows]).ids == rows.argmax(axis=1).tolist()


def test_logits_are_only_read():
    rows = logits(4)
    rows.flags.writeable = False
    options = {"top_k": 5, "top_p": 0.5, "min_p": 0.01, "typical_p": 0.9, "repetition_penalty": 1.5, "logprobs": 3,
               "logit_bias": {3: 1.0}, "allowed_token_ids": range(900)}  # fmt: skip
    for temperature in (0.0, 0.7):
        built = [sampler(temperature=temperature, prompt=[1, 2], min_tokens=1, end=[4], **options) for _ in rows]
        sample(rows, built)


# Filters


@PROPERTY
@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([7, 64, 65, 257, 1000, 2049, 4999, 20_011]),
    spread=st.sampled_from([0.1, 1.0, 4.0, 12.0]),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 20, 400, 5000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.001, 0.2]),
    typical_p=st.sampled_from([1.0, 1.0, 0.95, 0.3]),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_a_draw_is_that_of_the_reference(seed, vocab, spread, temperature, top_k, top_p, min_p, typical_p, uniform):
    """It lies in the reference's support, at the given point of the cumulative sum in the order of ids."""
    row = logits(1, vocab, seed, spread)[0]
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p)
    ids, p, margin = support(row, params)
    assume(margin > 1e-5)  # nearer than that, float32 may keep a token more or less
    drawn = SequenceSampler(params, vocab).choose(row, uniform)
    by_id = np.argsort(ids)
    (position,) = np.flatnonzero(ids[by_id] == drawn)
    cumulative = np.concatenate([[0.0], np.cumsum(p[by_id])])
    assert cumulative[position] - 1e-5 <= uniform <= cumulative[position + 1] + 1e-5


@default_cases(3)
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"typical_p": 0.7},
        {"top_k": 12, "top_p": 0.7, "min_p": 0.02, "typical_p": 0.9},
    ],
)
def test_frequencies_are_the_probabilities(params):
    row = logits(1, 40, seed=1, spread=1.5)
    one = sampler(vocab=40, seed=5, max_tokens=None, **params)
    draws = np.array([sample(row, [one]).ids[0] for _ in range(20_000)])
    ids, p, _ = support(row[0], one.params)
    counts = np.bincount(draws, minlength=40)
    assert set(np.flatnonzero(counts)) <= set(ids.tolist())
    expected = p * draws.size
    chi_square = float((((counts[ids] - expected) ** 2) / expected).sum())
    freedom = ids.size - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom) + 4


def test_ties_at_the_edge_of_top_k_go_to_lower_ids():
    row = np.zeros((1, 640), np.float32)
    one = sampler(vocab=640, top_k=3, seed=0, max_tokens=None)
    assert {sample(row, [one]).ids[0] for _ in range(200)} == {0, 1, 2}
    for count in (9, 10, 11, 300, 639, 640, 5000):
        one = sampler(vocab=640, top_k=count, seed=0, max_tokens=None)
        assert max(sample(row, [one]).ids[0] for _ in range(50)) < count


def test_flat_rows_and_forbidden_tokens():
    row = np.full((1, 300), -np.inf, np.float32)
    row[0, [7, 299]] = 2.0
    for params in ({}, {"top_p": 0.99}, {"top_k": 50}, {"min_p": 0.5}, {"typical_p": 0.9}, {"temperature": 1e300}):
        one = sampler(vocab=300, seed=1, max_tokens=None, **params)
        assert {sample(row, [one]).ids[0] for _ in range(60)} == {7, 299}


@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_k": 9}, {"typical_p": 0.5}, {"min_p": 0.5}])
def test_one_possible_token_is_taken(params):
    row = np.full(300, -np.inf, np.float32)
    row[123] = -1e4
    assert draw(row, sampler(vocab=300, logprobs=2, **params)) == 123


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_k": 3}, {"temperature": 0, "logit_bias": {1: 1}}])
def test_damaged_logits_are_their_rows_failure(bad, params):
    for index in (3, 2999):
        rows = logits(3, vocab=3000)
        clean = sample(rows, [sampler(vocab=3000, seed=1, **params) for _ in range(3)]).ids
        rows[1, index] = bad
        built = [sampler(vocab=3000, seed=1, **params) for _ in range(3)]
        assert sample(rows, built).ids == [clean[0], None, clean[2]]
        assert built[1].unsound and re.match(r"the largest logit is .*; run `llmc verify`", built[1].failure)
        assert [one.produced for one in built] == [1, 0, 1] and built[0].failure is None
    one = sampler(**params)
    assert sample(np.full((1, VOCAB), -np.inf, np.float32), [one]).ids == [None]
    assert "the largest logit is -inf" in one.failure


@pytest.mark.parametrize(
    "params", [{"allowed_token_ids": [5, 6]}, {"logit_bias": {1: 1}}, {"min_tokens": 3, "end": [0]}]
)
def test_masks_do_not_hide_damage(params):
    rows = logits(1, 50)
    rows[0, 0] = np.nan
    one = sampler(vocab=50, temperature=0, **params)
    assert sample(rows, [one]).ids == [None] and one.unsound


def test_extreme_logits_do_not_overflow():
    rows = np.array([[3e38, -3e38, 0.0, 2.9e38]], np.float32)
    assert sample(rows, [sampler(vocab=4, temperature=1e-3)]).ids == [0]


# Penalties, biases and masks


def test_penalties_follow_the_usual_rules():
    rows, prompt, output = logits(1, 50, seed=9), [1, 2, 2, 7], []
    options = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {4: 2.5}}
    one = sampler(vocab=50, prompt=prompt, temperature=0, max_tokens=None, **options)
    for _ in range(100):
        expected = penalised(rows[0], prompt, output, 1.4, 0.5, 0.3, {4: 2.5})
        np.testing.assert_allclose(one._adjusted(rows[0]), expected, rtol=1e-5, atol=1e-5)
        (chosen,) = sample(rows, [one]).ids
        assert expected[chosen] == pytest.approx(expected.max(), rel=1e-5)
        output.append(chosen)
    assert one.produced == 100 and len(set(output)) > 10


@pytest.mark.parametrize("params", [{"presence_penalty": 0.7}, {"frequency_penalty": 0.4}, {"repetition_penalty": 0.8}])
def test_each_penalty_alone(params):
    """Over more distinct tokens than are first made room for; the prompt counts for repetition only."""
    rows, prompt, output = logits(1, 300, seed=4, spread=0.2), [5, 6, 6], []
    one = sampler(vocab=300, prompt=prompt, seed=1, max_tokens=None, **params)
    named = {name.split("_")[0]: value for name, value in params.items()}
    for _ in range(250):
        output += sample(rows, [one]).ids
    np.testing.assert_allclose(
        one._adjusted(rows[0]), penalised(rows[0], prompt, output, **named), rtol=1e-5, atol=1e-5
    )
    assert len(set(output)) > 130


def test_a_repetition_penalty_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    from transformers import RepetitionPenaltyLogitsProcessor

    rows, prompt = logits(1, 50, seed=2), [3, 4, 9]
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt]), torch.from_numpy(rows.copy()))
    found = sampler(vocab=50, prompt=prompt, repetition_penalty=1.3)._adjusted(rows[0])
    np.testing.assert_allclose(found, expected.numpy()[0], rtol=1e-6)


@pytest.mark.parametrize(("penalty", "limit"), [(1e-35, 1e-30), (1e-30, 1e-30), (1e30, 1e30), (1e35, 1e30)])
def test_penalties_are_clipped_to_what_float32_divides_and_multiplies_by(penalty, limit):
    row = np.array([2.0, -3.0], np.float32)
    found = sampler(vocab=2, prompt=[0, 1], repetition_penalty=penalty)._adjusted(row)
    assert found.tolist() == [row[0] / np.float32(limit), row[1] * np.float32(limit)]


@pytest.mark.parametrize("penalty", [1e-300, 1e-38, 1e38, 1e300])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_penalty_breaks_a_batch(penalty, temperature):
    """What a request asks for must not look like damage, however absurd."""
    rows = logits(1, 40)
    rows[0, 3] = 0.0
    rows[0, 4] = -np.inf
    one = sampler(vocab=40, prompt=range(40), repetition_penalty=penalty, temperature=temperature, max_tokens=None)
    assert {sample(rows, [one]).ids[0] for _ in range(20)} <= set(range(40))


def test_biases_of_100_decide():
    rows = logits(1, spread=5.0)
    assert sample(rows, [sampler(logit_bias={77: 100.0}, seed=1)]).ids == [77]
    largest = int(rows.argmax())
    assert largest not in {sample(rows, [sampler(logit_bias={largest: -100})]).ids[0] for _ in range(50)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_end_token_before_min_tokens(temperature):
    row = np.zeros((1, 10), np.float32)
    row[0, [2, 3]] = 50.0
    one = sampler(vocab=10, end=[2], stop_token_ids=[3], min_tokens=4, temperature=temperature, seed=0)
    drawn = [sample(row, [one]).ids[0] for _ in range(8)]
    assert not {2, 3} & set(drawn[:4]) and set(drawn[4:]) <= {2, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_only_allowed_ids_are_chosen(temperature):
    rows, allowed = logits(1), [900, 3, 3, 41]
    one = sampler(allowed_token_ids=allowed, temperature=temperature, seed=2, max_tokens=None)
    drawn = {sample(rows, [one]).ids[0] for _ in range(300)}
    assert drawn == ({max(allowed, key=lambda i: rows[0, i])} if temperature == 0 else set(allowed))


def test_where_masks_leave_nothing_probable_something_allowed_is_chosen():
    row = np.full(20, -np.inf, np.float32)
    row[7] = 1.0
    one = sampler(vocab=20, allowed_token_ids=[4, 5], seed=0, max_tokens=None)
    assert {draw(row, one) for _ in range(50)} == {4, 5}
    assert draw(row, sampler(vocab=20, end=[7], min_tokens=3)) == 7
    assert draw(row, sampler(vocab=20, allowed_token_ids=[7], bad=[[7]])) == 7
    assert draw(row, sampler(vocab=20, allowed_token_ids=[3], end=[3], min_tokens=3)) == 3


def test_bad_words_are_never_completed():
    def runs(bad, steps=400):
        rows = np.zeros((1, 4), np.float32)
        one = sampler(vocab=4, seed=0, max_tokens=None, bad=bad)
        return "".join(str(sample(rows, [one]).ids[0]) for _ in range(steps))

    assert {"012", "33", "0123"} & {w for w in ("012", "33", "0123") if w in runs([])}
    text = runs([[0, 1, 2], [3, 3]])
    assert "012" not in text and "33" not in text and {"01", "12", "3"} <= {w for w in ("01", "12", "3") if w in text}
    assert set(runs([[2]])) == set("013")


def test_bad_words_are_spelled_with_and_without_a_space():
    def encode(text):
        return [ord(c) for c in text]

    assert bad_word_ids(["ab", " c"], encode) == ((97, 98), (32, 97, 98), (32, 99))
    assert bad_word_ids(["x"], lambda text: [5]) == ((5,),)
    with pytest.raises(InputError, match="bad_words need a tokenizer"):
        sampler(bad_words=["ab"])
    assert sampler(bad_words=["ab"], bad=[[9, 8]]).plain is False
