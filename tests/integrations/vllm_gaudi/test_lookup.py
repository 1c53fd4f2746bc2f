"""Which bucket a step takes, and which one a miss adds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.integrations.base import Demand, Found, Setup
from llmc.integrations.evaluation import evaluate
from llmc.integrations.vllm_gaudi.lookup import fallback_value
from tests.integrations.vllm_gaudi import planner
from tests.integrations.vllm_gaudi.setups import GAUDI, setup, setups
from tests.tiers import examples


@pytest.mark.parametrize(
    ("number", "step", "value"),
    [(0, 32, 0), (1, 2, 1), (31, 32, 128), (4001, 32, 4096), (7365, 32, 7680), (4026, 32, 4096), (24, 2, 24)],
)
def test_values_of_the_plug_ins_examples(number: int, step: int, value: int) -> None:
    assert fallback_value(number, step) == value


def test_the_first_covering_bucket_is_taken_and_not_the_cheapest() -> None:
    finder = GAUDI.finder(setup(), "decode", ((1, 1, 64), (2, 1, 2048), (4, 1, 64)))
    assert finder.find((2, 1, 40)) == Found((2, 1, 2048))
    assert finder.find((1, 1, 100)) == Found((2, 1, 2048))


@examples(60)
@given(setups(), st.data())
def test_found_buckets_are_the_planners(made: Setup, data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(["prompt", "decode"]))
    prepared = GAUDI.default(made)[family]
    finder = GAUDI.finder(made, family, prepared)
    known = list(prepared)
    for _ in range(8):
        batch, context = data.draw(st.integers(1, 300)), data.draw(st.integers(0, 5000))
        asked = (batch, data.draw(st.integers(2, 9000)) if family == "prompt" else 1, context)
        found = finder.find(asked)
        if family == "decode":
            asked = (batch, 1, min(context, max(c for _, _, c in prepared)))
        expected = planner.take(known, asked)
        if expected is None:
            assert found.miss == "compile"
            known.append(found.shape)  # type: ignore[arg-type]
        else:
            assert found.shape == expected


def test_a_miss_adds_a_bucket_within_the_limits() -> None:
    made = setup(8192, 32, 2048, num_hpu_blocks=4000)
    prompts = GAUDI.finder(made, "prompt", ((1, 128, 0),))
    assert prompts.find((1, 1000, 10)) == Found((1, 1280, 64), "compile")
    assert prompts.find((1, 1100, 60)) == Found((1, 1280, 64))
    assert prompts.find((1, 2001, 3)) == Found((1, 2048, 64), "compile")
    decodes = GAUDI.finder(made, "decode", ((1, 1, 300),))
    assert decodes.find((31, 1, 200)) == Found((32, 1, 300), "compile")
    assert decodes.find((31, 1, 999)) == Found((32, 1, 300), "compile")
    assert decodes.find((20, 1, 200)) == Found((32, 1, 300))


def test_a_step_that_is_larger_than_what_is_added_counts_in_its_own_size() -> None:
    made = setup(8192, 32, 2048)
    steps = {(2, 1, 90): Demand("decode", (2, 1, 90), 3, 3 * 92)}
    lists = {"prompt": ((1, 2048, 64),), "decode": ((2, 1, 60),)}
    decode = evaluate(GAUDI, made, lists, {"decode": steps}).family("decode")
    assert (decode.misses, decode.real, decode.padded) == ({"compile": 3}, 276, 276)


def test_long_prompts_of_a_slicing_server_are_rounded_to_slices() -> None:
    finder = GAUDI.finder(setup(32768, 8, 20480, sdpa_slices=True), "prompt", ((1, 128, 0),))
    assert finder.find((1, 9000, 0)).shape == (1, 9216, 0)
