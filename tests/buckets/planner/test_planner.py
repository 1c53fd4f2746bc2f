"""Making plans: the guide's example, precedence, filters, and what coverage adds."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given

from llmc.buckets.bucket import Bucket
from llmc.buckets.coverage import prove
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Note
from llmc.buckets.planner.planner import make_plan
from llmc.buckets.strategies import linear
from llmc.buckets.strategies.base import Range
from llmc.errors import InputError, UnknownNameError
from llmc.settings import Settings
from tests.buckets.generators import PROPERTY, plan_arguments


def notes(plan, kind):
    return [note for note in plan.provenance.notes if note.kind == kind]


def test_the_guides_example_has_24_and_48_buckets(guide_plan):
    assert len(guide_plan.prompt) == 24
    assert len(guide_plan.decode) == 48
    expected = product((1, 2, 4), range(128, 1025, 128), (0,))
    assert [(b.batch, b.query, b.context) for b in guide_plan.prompt] == sorted(expected)
    assert guide_plan.provenance.notes == ()


def test_prompts_above_the_ranges_get_one_bucket_to_run_through_in_chunks(guide_ranges):
    plan = make_plan(Limits(2048, 4), **guide_ranges)
    assert len(plan.prompt) == 25
    assert Bucket("prompt", 1, 1024, 1024) in plan.prompt
    (note,) = plan.provenance.notes
    assert note.kind == "added"
    assert "prompt[1x1024+1024], prompts of 1025 to 2047 tokens" in note.text


def test_defaults_cover_a_model_without_adding_or_dropping():
    plan = make_plan(Limits(2048))
    assert (len(plan.prompt), len(plan.decode)) == (4 * 16, 4 * 16)
    assert plan.provenance.notes == ()
    assert set(plan.provenance.origins.values()) == {"default"}


def test_a_token_limit_below_the_model_length_adds_the_chunk_bucket():
    plan = make_plan(Limits(2048, 4, 512))
    assert max(bucket.tokens for bucket in plan.prompt) == 512
    assert Bucket("prompt", 1, 512, 1536) in plan.prompt
    (dropped,) = notes(plan, "dropped")
    assert dropped.text == "batch*query above max_num_batched_tokens 512"
    assert dropped.count == 3 * 4 - (4 + 2 + 1)


def test_a_top_that_the_rule_does_not_reach_is_added_to_its_dimension():
    plan = make_plan(Limits(1000, 48))
    assert {bucket.batch for bucket in plan.decode} == {1, 2, 4, 8, 16, 32, 48}
    assert {bucket.context for bucket in plan.decode} == {*range(128, 1000, 128), 1000}
    assert "the top of batch, 48, which 1,32,48 does not reach by its rule" in [
        note.text for note in notes(plan, "added")
    ]


def test_a_value_over_a_limit_is_dropped_and_the_limit_takes_its_place():
    plan = make_plan(Limits(64, 8), decode_batch=Range(3, 3, 9))
    assert {bucket.batch for bucket in plan.decode} == {3, 6, 8}
    assert notes(plan, "dropped") == [Note("dropped", "batch above max_num_seqs 8", "decode", 1)]


def test_decode_ranges_below_the_limits_get_one_bucket():
    plan = make_plan(Limits(512, 8), decode_batch=Range(1, 1, 4), decode_context=Range(128, 128, 256))
    assert len(plan.decode) == 4 * 2 + 1
    assert plan.decode[-1] == Bucket("decode", 8, 1, 512)
    assert "decode batch 1 to 4 with 257 to 511 cached tokens" in plan.provenance.notes[0].text


def test_buckets_that_no_admissible_prompt_needs_are_dropped():
    plan = make_plan(Limits(65, 1), prompt_query=Range(16, 16, 64), prompt_context=Range(0, 16, 64))
    corners = {(bucket.query, bucket.context) for bucket in plan.prompt}
    assert (16, 48) in corners
    assert (32, 48) in corners
    assert (48, 48) not in corners
    (dropped,) = notes(plan, "dropped")
    assert dropped.text == "needed only by prompts above the longest admitted, 64 tokens"
    assert dropped.count + len(plan.prompt) == 4 * 5


@PROPERTY
@given(plan_arguments())
def test_filters_drop_no_bucket_that_an_admissible_request_rounds_up_to(arguments):
    try:
        plan = make_plan(**arguments)
    except InputError:
        return
    limits = plan.limits
    ranges = plan.provenance.parameters
    kept = {(bucket.batch, bucket.query, bucket.context) for bucket in plan.prompt}
    batches, queries, contexts = (
        linear.values(**ranges[name]) for name in ("prompt_batch", "prompt_query", "prompt_context")
    )
    for new in range(1, limits.longest_prompt + 1):
        query = next((value for value in queries if new <= value <= limits.max_model_len), None)
        for past in range(limits.longest_prompt - new + 1):
            context = next((value for value in contexts if past <= value <= limits.max_model_len), None)
            if query is None or context is None:
                continue
            for batch in batches:
                if batch <= limits.max_num_seqs and batch * query <= limits.max_num_batched_tokens:
                    assert (batch, query, context) in kept


@PROPERTY
@given(plan_arguments())
def test_no_bucket_breaks_a_limit(arguments):
    try:
        plan = make_plan(**arguments)
    except InputError:
        return
    limits = plan.limits
    for bucket in plan.buckets:
        assert bucket.batch <= limits.max_num_seqs
        assert max(bucket.query, bucket.context) <= limits.max_model_len
        assert bucket.phase == "decode" or bucket.tokens <= limits.max_num_batched_tokens


@PROPERTY
@given(plan_arguments())
def test_plans_are_deterministic_sorted_and_distinct(arguments):
    try:
        plan = make_plan(**arguments)
    except InputError:
        return
    again = make_plan(**arguments)
    assert (plan, plan.digest(), plan.to_json()) == (again, again.digest(), again.to_json())
    assert all(before < after for before, after in pairwise(plan.buckets))


def test_a_flag_wins_over_the_environment_and_that_over_the_default():
    settings = Settings.from_environment(
        {
            "VLLM_PROMPT_BS_BUCKET_MAX": "2",
            "VLLM_PROMPT_QUERY_BUCKET_STEP": "64",
            "VLLM_DECODE_BS_BUCKET_MAX": "4",
            "VLLM_BUCKETING_STRATEGY": "lin",
        }
    )
    plan = make_plan(Limits(256, 4), prompt_batch=Range(1, 1, 4), settings=settings)
    assert {bucket.batch for bucket in plan.prompt} == {1, 2, 3, 4}
    assert plan.provenance.parameters["prompt_query"] == {"min": 128, "step": 64, "max": 256}
    origins = plan.provenance.origins
    assert origins["prompt_batch.max"] == "flag"
    assert origins["prompt_query.min"] == "default"
    assert origins["prompt_query.step"] == "environment VLLM_PROMPT_QUERY_BUCKET_STEP"
    assert origins["decode_batch.max"] == "environment VLLM_DECODE_BS_BUCKET_MAX"
    assert origins["strategy"] == "environment VLLM_BUCKETING_STRATEGY"


def test_a_strategy_given_wins_over_the_environment():
    settings = Settings(strategy="exponential")
    assert make_plan(Limits(64), "linear", settings=settings).provenance.origins["strategy"] == "flag"


def test_blocks_in_the_environment_are_tokens_in_the_plan():
    settings = Settings.from_environment(
        {
            "VLLM_DECODE_BLOCK_BUCKET_STEP": "4",
            "VLLM_PROMPT_CTX_BUCKET_MAX": "2",
            "VLLM_DECODE_SEQ_BUCKET_MIN": "32",
        }
    )
    parameters = make_plan(Limits(256, block_size=16), settings=settings).provenance.parameters
    assert parameters["decode_context"] == {"min": 32, "step": 64, "max": 256}
    assert parameters["prompt_context"]["max"] == 32


def test_a_default_min_gives_way_to_a_lower_max_from_the_environment():
    settings = Settings.from_environment({"VLLM_PROMPT_QUERY_BUCKET_MAX": "64"})
    plan = make_plan(Limits(256), settings=settings)
    assert plan.provenance.parameters["prompt_query"] == {"min": 64, "step": 128, "max": 64}
    assert prove(plan.limits, plan.buckets) == []


def test_a_bad_range_from_the_environment_names_its_variables():
    settings = Settings.from_environment({"VLLM_DECODE_BS_BUCKET_STEP": "0"})
    with pytest.raises(InputError, match=r"decode batch \(from VLLM_DECODE_BS_BUCKET_STEP\) 1,0,8: step"):
        make_plan(Limits(64), settings=settings)
    settings = Settings.from_environment({"VLLM_PROMPT_BS_BUCKET_MAX": "-4"})
    with pytest.raises(InputError, match=r"VLLM_PROMPT_BS_BUCKET_MAX.*max must not be negative"):
        make_plan(Limits(64), settings=settings)


def test_warnings_of_the_settings_are_notes_of_the_plan():
    settings = Settings(bucket_file="buckets.txt", warnings=("X is ignored",))
    texts = [note.text for note in notes(make_plan(Limits(64), "linear", settings=settings), "warning")]
    assert texts == ["X is ignored", "VLLM_BUCKETING_FROM_FILE has no effect: the strategy is linear (flag)"]


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({"prompt_batch": Range(0, 1, 4, "--prompt-batch")}, "--prompt-batch 0,1,4: no step has 0 sequences"),
        ({"prompt_query": Range(0, 1, 4, "--prompt-seq")}, "--prompt-seq 0,1,4: no step has 0 new tokens"),
        ({"prompt_query": Range(32, 8, 64)}, "no prompt bucket is left, so the plan covers nothing"),
    ],
)
def test_ranges_that_make_no_plan_are_refused(ranges, message):
    with pytest.raises(InputError, match=message):
        make_plan(Limits(64, 4, 16), **ranges)


def test_a_product_that_could_never_be_compiled_is_refused():
    with pytest.raises(InputError, match="raise the steps or lower the maxima"):
        make_plan(Limits(4096), prompt_query=Range(1, 1, 4096), prompt_context=Range(0, 1, 4096))


def test_an_unknown_strategy_is_refused():
    with pytest.raises(UnknownNameError):
        make_plan(Limits(64), "cubic")


@pytest.mark.parametrize("length", [2, 3, 17, 127, 128, 129])
def test_tiny_models_have_plans(length):
    for limits in (Limits(length, 1), Limits(length, 3, 3)):
        assert prove(limits, make_plan(limits).buckets) == []
