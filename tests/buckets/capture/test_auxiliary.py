"""What is warmed beside the buckets: every kind of sampling at every decode batch, top logits, moves of prefixes."""

from __future__ import annotations

from dataclasses import fields

import pytest

from llmc.buckets.capture.auxiliary import SAMPLING, CacheMove, SampleStep, TopStep, auxiliary
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan, Provenance
from llmc.runtime.engine.sampling.params import SamplingParams, StructuredOutputsParams
from tests.buckets.capture.simulated import decode, prompt

PLAN = Plan(
    Limits(64, 4, block_size=16),
    (prompt(1, 32), prompt(3, 16, 32), decode(4, 64), decode(1, 32), decode(1, 64)),
    Provenance("linear"),
)

NO_PROGRAM = {
    "max_tokens", "stop", "stop_token_ids", "ignore_eos", "n", "best_of", "prompt_logprobs", "skip_special_tokens",
    "kept_special_ids", "forced_token_ids",
    "include_stop_str_in_output", "truncate_prompt_tokens", "detokenize", "output_kind",
}  # fmt: skip
"""Parameters that choose when to stop and what to return, and leave what is computed of the logits alone."""


def test_every_kind_of_sampling_runs_at_every_decode_batch_the_largest_first():
    assert auxiliary(PLAN).samples == tuple(SampleStep(batch, kind) for batch in (4, 1) for kind in SAMPLING)


def test_prefixes_are_moved_at_every_context_that_a_cache_can_hold():
    assert auxiliary(PLAN).moves == (CacheMove(63), CacheMove(32))


def test_top_logits_are_fetched_for_every_batch_where_graphs_return_them():
    assert auxiliary(PLAN).tops == ()
    assert auxiliary(PLAN, 16).tops == (TopStep(4, 16), TopStep(3, 16), TopStep(1, 16))
    assert len(auxiliary(PLAN, 16)) == 2 * len(SAMPLING) + 3 + 2


@pytest.mark.parametrize("kind", SAMPLING)
def test_every_kind_is_one_that_the_engine_takes(kind):
    values = dict(SAMPLING[kind])
    if form := values.pop("structured_outputs", None):
        values["structured_outputs"] = StructuredOutputsParams(**form)
    built = SamplingParams(**values)
    assert all(getattr(built, name) == value for name, value in values.items())


def test_every_parameter_that_changes_what_is_computed_is_warmed():
    warmed = {name for values in SAMPLING.values() for name in values}
    assert {field.name for field in fields(SamplingParams)} - NO_PROGRAM == warmed
