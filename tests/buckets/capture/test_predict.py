"""Predictions of a graph's bytes: monotone in its tokens, never below what was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.capture.predict import Predictor
from tests.buckets.capture.simulated import decode, prompt
from tests.buckets.generators import PROPERTY

measured = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 10_000)), min_size=1, max_size=30)


def predictor(graphs):
    found = Predictor()
    for tokens, size in graphs:
        found.add(prompt(1, tokens), size)
    return found


@PROPERTY
@given(measured, st.integers(1, 300), st.integers(1, 300))
def test_more_tokens_never_take_less(graphs, one, other):
    predict = predictor(graphs)
    few, many = sorted((one, other))
    assert predict(prompt(1, few)) <= predict(prompt(1, many))


@PROPERTY
@given(measured, st.integers(1, 300))
def test_a_prediction_is_at_least_what_a_graph_of_no_more_tokens_took(graphs, tokens):
    held = max((size for other, size in graphs if other <= tokens), default=0)
    assert predictor(graphs)(prompt(1, tokens)) >= held


@PROPERTY
@given(st.lists(st.integers(1, 500), min_size=1, unique=True), st.integers(0, 10_000), st.integers(0, 99))
def test_in_ascending_order_graphs_with_a_fixed_part_are_never_underestimated(sizes, fixed, rate):
    predict = Predictor()
    for index, tokens in enumerate(sorted(sizes)):
        if index:
            assert predict(prompt(1, tokens)) >= fixed + rate * tokens
        predict.add(prompt(1, tokens), fixed + rate * tokens)


def test_graphs_that_grow_with_the_square_are_followed_closer_than_by_the_mean():
    predict, seen = Predictor(), []
    for tokens in range(128, 2049, 128):
        seen.append((tokens, tokens**2))
        predict.add(prompt(1, tokens), tokens**2)
    mean = sum(size for _, size in seen) / sum(tokens for tokens, _ in seen) * 2176
    assert mean < 0.7 * 2176**2
    assert predict(prompt(1, 2176)) == pytest.approx(2176**2, rel=0.06)


def test_proportional_graphs_are_predicted_exactly_in_either_direction():
    predict = predictor([(64, 64 * 1000)])
    assert predict(decode(16, 999)) == 16_000
    assert predict(prompt(2, 64)) == 128_000


def test_before_the_first_measurement_the_estimate_counts_and_afterwards_the_measurement():
    predict = Predictor(lambda bucket: 7 * bucket.tokens)
    assert predict(prompt(1, 10)) == 70
    predict.add(prompt(1, 10), 30)
    assert predict(prompt(1, 10)) == 30
    assert Predictor()(prompt(1, 10)) == 0


@PROPERTY
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 99)), min_size=2, unique=True), st.integers(1, 50))
def test_an_estimate_that_is_wrong_by_a_factor_is_right_from_the_second_graph_on(shapes, factor):
    def grown(bucket):
        return bucket.batch * (7 + bucket.context)

    predict = Predictor(grown)
    for index, (batch, context) in enumerate(shapes):
        graph = decode(batch, context)
        if index:
            assert predict(graph) == factor * grown(graph)
        predict.add(graph, factor * grown(graph))


def test_an_estimate_of_nothing_is_none():
    blind, none = Predictor(lambda bucket: 0), Predictor()
    for predict in (blind, none):
        assert predict(prompt(1, 10)) == 0
        predict.add(prompt(1, 10), 30)
    assert blind(prompt(4, 10)) == none(prompt(4, 10)) == 120
