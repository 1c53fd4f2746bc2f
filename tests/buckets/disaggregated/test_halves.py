"""The halves of a plan for two devices: each has its phase whole, and serves the other one alone with one bucket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.coverage import prove
from llmc.buckets.disaggregated.halves import half
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan
from llmc.buckets.planner.planner import make_plan
from llmc.errors import InputError
from llmc.testing.toy import toy_plan
from tests.tiers import examples


@given(length=st.integers(2, 4096), seqs=st.integers(1, 64))
@examples(40, database=None, derandomize=True)
def test_each_half_covers_every_request_with_one_bucket_of_the_other_phase(length: int, seqs: int) -> None:
    plan = make_plan(Limits(length, seqs))
    prompts, decodes = half(plan, "prompt"), half(plan, "decode")
    assert prompts.prompt == plan.prompt and decodes.decode == plan.decode
    assert len(prompts.decode) == len(decodes.prompt) == 1
    for built in (prompts, decodes):
        assert not prove(built.limits, built.buckets)
        assert Plan.from_json(built.to_json()) == built


def test_what_the_other_half_runs_is_reported() -> None:
    plan = toy_plan()
    dropped = half(plan, "decode").provenance.notes[-1]
    assert (dropped.kind, dropped.phase, dropped.count) == ("dropped", "prompt", len(plan.prompt) - 1)
    assert "the other device runs them" in dropped.text


def test_a_plan_that_does_not_cover_its_limits_has_no_halves() -> None:
    plan = toy_plan()
    for phase, gone in (("prompt", plan.decode), ("decode", plan.prompt)):
        reach = max(b.context + b.query for b in gone)
        kept = (b for b in plan.buckets if b not in gone or b.context + b.query < reach)
        part = Plan(plan.limits, tuple(kept), plan.provenance)
        with pytest.raises(InputError, match="plan anew"):
            half(part, phase)  # type: ignore[arg-type]
