"""What the property tests of buckets draw from."""

from __future__ import annotations

from hypothesis import strategies as st

from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan, Provenance
from llmc.buckets.strategies.base import Range
from tests.tiers import examples

PROPERTY = examples(150, database=None, derandomize=True)
"""Settings of every property test: the same cases on every run."""


@st.composite
def small_limits(draw: st.DrawFn) -> Limits:
    length = draw(st.integers(2, 80))
    seqs = draw(st.integers(1, 9))
    return Limits(
        length,
        seqs,
        draw(st.none() | st.integers(seqs, seqs * length)),
        draw(st.none() | st.integers(1, length)),
        draw(st.none() | st.integers(1, length - 1)),
    )


@st.composite
def small_ranges(draw: st.DrawFn, least: int, most: int = 90) -> Range:
    low = draw(st.integers(least, most))
    return Range(low, draw(st.integers(1, 40)), draw(st.integers(low, most)))


@st.composite
def plan_arguments(draw: st.DrawFn) -> dict[str, object]:
    """Limits and any subset of ranges, wide enough to exceed the limits and narrow enough to miss them."""
    return {
        "limits": draw(small_limits()),
        "prompt_batch": draw(st.none() | small_ranges(1, 12)),
        "prompt_query": draw(st.none() | small_ranges(1)),
        "prompt_context": draw(st.none() | small_ranges(0)),
        "decode_batch": draw(st.none() | small_ranges(1, 12)),
        "decode_context": draw(st.none() | small_ranges(0)),
    }


def buckets(phase: str, size: int = 20) -> st.SearchStrategy[list[Bucket]]:
    """Distinct buckets of one phase in no particular arrangement."""
    query = st.integers(1, 8) if phase == "prompt" else st.just(1)
    one = st.builds(Bucket, st.just(phase), st.integers(1, 5), query, st.integers(0, 12))
    return st.lists(one, min_size=1, max_size=size, unique=True)


@st.composite
def small_plans(draw: st.DrawFn) -> Plan:
    """Plans of any buckets: most leave requests uncovered."""
    return Plan(Limits(14, 5), (*draw(buckets("prompt")), *draw(buckets("decode"))), Provenance("by hand"))
