"""What graphs do on steps, by a server's own look-up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmc.integrations.base import GraphCost, GraphDemand, Setup, collect
from llmc.integrations.evaluation import evaluate
from tests.integrations.fake import Fake

DEMANDS = collect(
    [
        GraphDemand("tokens", (3,), 10, 30),
        GraphDemand("tokens", (100,), 2, 200),
        GraphDemand("decode", (2,), 5, 10),
        GraphDemand("tokens", (3,), 10, 30),
        GraphDemand("decode", (9,), 1, 9),
    ]
)
LISTS = {"tokens": ((4,), (8,)), "decode": ((2,),)}


def test_steps_of_one_shape_are_added_up_in_the_order_they_came() -> None:
    assert list(DEMANDS["tokens"]) == [(3,), (100,)]
    assert DEMANDS["tokens"][3,] == GraphDemand("tokens", (3,), 20, 60)


def test_padding_is_of_steps_in_graphs_and_misses_are_reported(fake: Fake, setup: Setup) -> None:
    found = evaluate(fake, setup, LISTS, DEMANDS)
    tokens, decode = found.families
    assert (tokens.real, tokens.padded, tokens.steps) == (60, 80, 22)
    assert tokens.padding == pytest.approx(1 / 3) and tokens.padding_p95 == pytest.approx(1 / 3)
    assert tokens.misses == {"eager": 2} and tokens.missed == (((100,), 2),)
    assert tokens.unused == ((8,),)
    assert (decode.real, decode.padded, decode.misses) == (19, 19, {"compile": 1})
    assert found.missing == 3 / 28 and found.worst == tokens.padding
    assert (found.graphs, found.warmup_seconds, found.graph_bytes) == (2, 4.0, None)


def test_a_family_whose_unit_says_little_of_time_is_not_judged(fake: Fake, setup: Setup) -> None:
    found = evaluate(fake, setup, {**LISTS, "decode": ((50,),)}, DEMANDS)
    tokens, decode = found.families
    assert found.padding == {"tokens": tokens.padding, "decode": decode.padding} and found.worst == decode.padding
    apart = replace(found, families=(tokens, replace(decode, family=replace(decode.family, counted=False))))
    assert apart.worst == tokens.padding


def test_a_given_cost_stands_in_for_the_published_one(fake: Fake, setup: Setup) -> None:
    found = evaluate(fake, setup, LISTS, DEMANDS, GraphCost(None, 1 << 20, "here"))
    assert (found.warmup_seconds, found.graph_bytes) == (None, 2 << 20)


def test_nothing_to_judge_all_padding_nothing(fake: Fake, setup: Setup) -> None:
    found = evaluate(fake, setup, LISTS, {})
    assert found.padding == {"tokens": None, "decode": None} and found.worst == found.missing == 0.0
    assert found.to_dict()["families"]["tokens"]["unused"] == [[4], [8]]  # type: ignore[index]
