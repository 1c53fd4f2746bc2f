"""The guide's example, shared by the bucket tests."""

from __future__ import annotations

import pytest

from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan
from llmc.buckets.planner.planner import make_plan
from llmc.buckets.strategies.base import Range


@pytest.fixture
def guide_ranges() -> dict[str, Range]:
    """The ranges of the Gaudi guide's logged example."""
    return {
        "prompt_batch": Range(1, 32, 4),
        "prompt_query": Range(128, 128, 1024),
        "decode_batch": Range(1, 128, 4),
        "decode_context": Range(128, 128, 2048),
    }


@pytest.fixture
def guide_plan(guide_ranges: dict[str, Range]) -> Plan:
    return make_plan(Limits(2048, 4, max_prompt_len=1024), **guide_ranges)
