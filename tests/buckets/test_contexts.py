"""Plans for models that keep states alone: graphs read no cached tokens, so one context serves any past."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from llmc.buckets.bucket import Bucket
from llmc.buckets.coverage import prove
from llmc.buckets.evaluation.replay import replay
from llmc.buckets.limits import Limits
from llmc.buckets.lookup import decode_path, prefill_path
from llmc.buckets.plan import Plan, Provenance
from llmc.buckets.planner.budget import Budget
from llmc.buckets.planner.planner import make_plan
from llmc.buckets.report.text import plan_text
from llmc.buckets.strategies import names
from llmc.buckets.strategies.base import Range
from llmc.buckets.traffic.source import Traffic
from llmc.errors import InputError
from tests.buckets.planner.test_choice import SAMPLE

WHOLE = Limits(4096, 4, 1024)
ALONE = WHOLE.reading(False)


@pytest.mark.parametrize("strategy", [name for name in names() if name not in ("file", "traffic")])
def test_every_rule_plans_context_0_alone_and_covers_all(strategy: str) -> None:
    plan = make_plan(ALONE, strategy)
    assert {bucket.context for bucket in plan.buckets} == {0}
    assert prove(plan.limits, plan.buckets) == []
    assert len(plan.buckets) < len(make_plan(WHOLE, strategy).buckets)
    assert Plan.from_json(plan.to_json()) == plan


def test_the_report_says_how_many_graphs_instead_of_how_many() -> None:
    plan, whole = make_plan(ALONE), make_plan(WHOLE)
    found = plan_text(plan)
    for phase, few, many in (("prompt", plan.prompt, whole.prompt), ("decode", plan.decode, whole.decode)):
        said = f"its graphs need no contexts: {len(few)} in place of {len(many)}"
        bucket = "bucket" if len(many) - len(few) == 1 else "buckets"
        dropped = f"dropped {len(many) - len(few)} {phase} {bucket}"
        assert f"{dropped}: the model has only recurrent state, so {said}" in found
    assert "contexts: none, the model has only recurrent state" in found
    assert "contexts" not in whole.limits.to_dict()
    assert not replace(ALONE, max_num_seqs=2).contexts, "another limit changes nothing of it"


def test_any_past_has_its_bucket_and_long_prompts_run_in_chunks() -> None:
    plan = Plan(ALONE, (Bucket("prompt", 1, 512, 0), Bucket("decode", 4, 1, 0)), Provenance("it"))
    assert prove(ALONE, plan.buckets) == []
    assert plan.lookup("decode", 3, 1, 4095) == Bucket("decode", 4, 1, 0)
    assert [step.rows for step in decode_path(plan, [4095, 7, 0])] == [(0, 1, 2)]
    assert [step.spans for step in prefill_path(plan, [1300], [100])] == [
        ((100, 612),),
        ((612, 1124),),
        ((1124, 1300),),
    ]


def test_a_batch_too_small_is_still_a_gap() -> None:
    missing = prove(ALONE, [Bucket("prompt", 1, 512, 0), Bucket("decode", 2, 1, 0)])
    assert [str(gap) for gap in missing] == ["decode batch 3 to 4 with 0 to 4095 cached tokens"]


def test_a_plan_with_a_context_is_refused_when_it_is_read() -> None:
    fields = json.loads(make_plan(ALONE).to_json())
    fields["decode"][-1][2] = 128
    with pytest.raises(InputError, match="context 128 is above that of a model with only recurrent state, 0"):
        Plan.from_json(json.dumps(fields))
    fields["limits"]["contexts"] = 0
    with pytest.raises(InputError, match=r"'limits.contexts'.* true or false"):
        Plan.from_json(json.dumps(fields))


def test_a_range_of_contexts_has_no_effect_and_is_named() -> None:
    plan = make_plan(ALONE, decode_context=Range(128, 128, 512, "--decode-seq"))
    assert {bucket.context for bucket in plan.decode} == {0}
    assert "--decode-seq has no effect" in plan_text(plan)


@pytest.mark.parametrize("strategy", ["traffic", "exponential"])
def test_traffic_is_padded_in_sequences_not_in_cached_tokens(strategy: str) -> None:
    """Steps of 1 to 4 sequences: with all four batches nothing is padded, with one graph up to three rows are."""
    limits = Limits(8192, 4).reading(False)
    traffic = Traffic(SAMPLE, 4.0)
    found = [
        replay(make_plan(limits, strategy, traffic=traffic, budget=Budget(max_graphs=graphs)), traffic).decode
        for graphs in (1, 4)
    ]
    alone, all_four = (one.padding for one in found)
    assert alone is not None and all_four is not None
    assert 0 <= all_four < alone <= 3
    assert found[0].uncovered == found[1].uncovered == 0
    planned = make_plan(limits, strategy, traffic=traffic, budget=Budget(max_graphs=1))
    assert planned.provenance.facts["decode_padding"] == pytest.approx(alone, abs=1e-6)
