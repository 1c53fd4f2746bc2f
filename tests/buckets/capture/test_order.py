"""The orders of capture and of the warm-up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.capture.order import STRATEGIES, warm_up_order
from tests.buckets.capture.simulated import GUIDE, decode, prompt
from tests.buckets.generators import PROPERTY


def test_max_bs_takes_large_batches_then_short_sequences_as_the_guides_example():
    plan = [decode(batch, context) for batch in (1, 32, 64) for context in (256, 128)]
    assert [(b.batch, b.context) for b in sorted(plan, key=STRATEGIES["max_bs"])] == [
        (64, 128), (64, 256), (32, 128), (32, 256), (1, 128), (1, 256),
    ]  # fmt: skip


def test_min_tokens_takes_few_tokens_then_short_sequences():
    plan = [prompt(1, 256), prompt(2, 128), prompt(1, 128), prompt(4, 128), prompt(1, 256, 128)]
    assert [(b.batch, b.query, b.context) for b in sorted(plan, key=STRATEGIES["min_tokens"])] == [
        (1, 128, 0), (2, 128, 0), (1, 256, 0), (1, 256, 128), (4, 128, 0),
    ]  # fmt: skip


def test_with_traffic_the_hottest_of_both_phases_come_first():
    steps = {prompt(1, 256): 90, prompt(1, 128): 10, decode(2, 512): 5000, decode(1, 512): 5000}
    order = warm_up_order(GUIDE, steps)
    assert order[:4] == [prompt(1, 256), decode(2, 512), decode(1, 512), prompt(1, 128)]
    assert order[4:] == [bucket for bucket in warm_up_order(GUIDE) if bucket not in steps]


@PROPERTY
@given(st.sets(st.sampled_from(GUIDE)), st.dictionaries(st.sampled_from(GUIDE), st.integers(0, 9)))
def test_every_bucket_is_warmed_once_in_any_order(plan, steps):
    assert sorted(warm_up_order(sorted(plan))) == sorted(warm_up_order(sorted(plan), steps)) == sorted(plan)
