"""The report of a plan: rows of data, and the text."""

from __future__ import annotations

import pytest

from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan, Provenance
from llmc.buckets.planner.planner import make_plan
from llmc.buckets.report import traffic_view
from llmc.buckets.report.text import dimension_rows, plan_text
from llmc.settings import Settings


def test_rows_hold_the_values_that_the_plan_has(guide_plan):
    rows = {row.dimension: row for row in dimension_rows(guide_plan)}
    assert list(rows) == ["prompt batch", "prompt query", "prompt context", "decode batch", "decode context"]
    assert rows["prompt batch"].values == (1, 2, 4)
    assert rows["prompt batch"].bounds == "1,32,4"
    assert rows["prompt batch"].origin == "flag"
    assert rows["prompt context"].origin == "default"


def test_long_lists_of_values_are_cut(guide_plan):
    row = dimension_rows(guide_plan)[-1]
    assert row.cells()[1] == "128 256 384 512 640 768 … 2048"
    assert row.cells()[2] == "16"


def test_the_text_says_what_was_counted_added_and_dropped():
    settings = Settings.from_environment({"VLLM_PROMPT_BS_BUCKET_MAX": "4", "VLLM_PROMPT_LOST_BUCKET_MAX": "1"})
    text = plan_text(make_plan(Limits(2048, 4, 512), settings=settings, limit_origins={"block_size": "flag"}))
    assert "strategy linear (default)" in text
    assert "block_size 128 (flag)" in text
    assert "max_num_seqs 4\n" in text
    assert "buckets: 8 prompt, 48 decode" in text
    assert "dropped 5 prompt buckets: batch*query above max_num_batched_tokens 512" in text
    assert "added 1 prompt bucket: prompt[1x512+1536]" in text
    assert "warning: VLLM_PROMPT_LOST_BUCKET_MAX is ignored" in text
    assert "min: default, step: default, max: environment VLLM_PROMPT_BS_BUCKET_MAX" in text


def test_a_plan_without_parameters_can_be_reported():
    plan = Plan(Limits(8, 1), (Bucket("prompt", 1, 8, 0), Bucket("decode", 1, 1, 8)), Provenance("by hand"))
    assert "buckets: 1 prompt, 1 decode" in plan_text(plan)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "0.5 s"), (119.6, "120 s"), (120, "0:02:00"), (120.4, "0:02:00"), (3725, "1:02:05"), (90_061, "25:01:01")],
)
def test_seconds_are_readable_from_half_a_second_to_a_day(seconds: float, text: str) -> None:
    assert traffic_view._seconds(seconds) == text
