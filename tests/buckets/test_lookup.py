"""Lookup: the least-cost covering bucket, never a smaller one, and fast."""

from __future__ import annotations

from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets import lookup
from llmc.buckets.bucket import Bucket
from llmc.buckets.cost.work import cost
from llmc.buckets.limits import Limits
from llmc.buckets.lookup import LookupTable
from llmc.buckets.planner.planner import make_plan
from tests.buckets.generators import PROPERTY, buckets
from tests.tiers import full
from tests.timing import least_cpu_seconds


def test_the_guides_example_request(guide_plan):
    """Three sequences, the longest 412 tokens: their prompt, then decode as they shrink and grow."""
    assert guide_plan.lookup("prompt", 3, 412, 0) == Bucket("prompt", 4, 512, 0)
    assert guide_plan.lookup("decode", 3, 1, 412) == Bucket("decode", 4, 1, 512)
    assert guide_plan.lookup("decode", 2, 1, 412) == Bucket("decode", 2, 1, 512)
    assert guide_plan.lookup("decode", 3, 1, 513) == Bucket("decode", 4, 1, 640)


def test_a_request_above_every_bucket_has_none(guide_plan):
    assert guide_plan.lookup("prompt", 5, 1, 0) is None
    assert guide_plan.lookup("prompt", 1, 1025, 0) is None
    assert guide_plan.lookup("prompt", 1, 1, 1) is None
    assert guide_plan.lookup("decode", 1, 1, 2049) is None


def test_the_first_bucket_in_order_is_not_taken_when_a_later_one_costs_less():
    long_first = [Bucket("prompt", 1, 4096, 0), Bucket("prompt", 2, 128, 0)]
    assert LookupTable(long_first).find(1, 100, 0) == Bucket("prompt", 2, 128, 0)


@PROPERTY
@given(buckets("prompt"), st.lists(st.tuples(*[st.integers(0, 14)] * 3), min_size=1, max_size=8))
def test_lookup_is_the_least_cost_cover(known, requests):
    looked_up = LookupTable(known)
    for request in requests * 2:
        covering = [bucket for bucket in known if bucket.covers(*request)]
        expected = min(covering, key=lambda bucket: (cost(bucket), bucket), default=None)
        assert looked_up.find(*request) == expected


def test_a_decode_step_looks_up_in_microseconds():
    plan = make_plan(Limits(32768, 64))
    plan.lookup("decode", 1, 1, 1)
    requests = [(batch, context) for batch in range(1, 65) for context in range(1, 32768, 500)]

    def look_up():
        for batch, context in requests:
            plan.lookup("decode", batch, 1, context)

    assert least_cpu_seconds(look_up) / len(requests) < 5e-6


@PROPERTY
@given(buckets("prompt"), st.lists(st.tuples(*[st.integers(0, 14)] * 3), min_size=1, max_size=8))
def test_a_grid_too_large_to_hold_is_searched_and_gives_the_same(known, requests):
    whole = LookupTable(known)
    with mock.patch.object(lookup, "MAX_CORNERS", 0):
        searched = LookupTable(known)
    for request in requests * 2:
        assert searched.find(*request) == whole.find(*request)


@full
def test_a_plan_of_scattered_buckets_looks_up_as_fast_as_a_product():
    scattered = {Bucket("decode", 1 + i * 7919 % 64, 1, 1 + i * 104729 % 131072) for i in range(20_000)}
    known = LookupTable(scattered)
    requests = [(1 + i * 31 % 64, 1, i * 6007 % 131072) for i in range(20_000)]
    assert least_cpu_seconds(lambda: [known.find(*request) for request in requests]) / len(requests) < 10e-6
    found = [known.find(*request) for request in requests]
    for request, bucket in list(zip(requests, found, strict=True))[::500]:
        covering = [other for other in scattered if other.covers(*request)]
        assert bucket == min(covering, key=lambda other: (cost(other), other), default=None)
