"""Plans of different forms to schedule over."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from llmc.buckets.bucket import Bucket
from llmc.buckets.coverage import prove
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan, Provenance
from llmc.buckets.planner.planner import make_plan
from llmc.buckets.strategies.base import Range

Sizes = tuple[int, int, int]


def plan_of(limits: Limits, prompt: Iterable[Sizes], decode: Iterable[tuple[int, int]]) -> Plan:
    """Exactly these buckets."""
    buckets = [Bucket("prompt", *sizes) for sizes in prompt]
    buckets += [Bucket("decode", batch, 1, context) for batch, context in decode]
    plan = Plan(limits, tuple(buckets), Provenance("test"))
    assert not prove(plan.limits, plan.buckets), prove(plan.limits, plan.buckets)
    return plan


@cache
def plans() -> dict[str, Plan]:
    """By name; sequences of at most 32 to 256 tokens, but for "guide"."""
    doubled = [(batch, query, context) for batch in (1, 2, 4, 8) for query in (16, 32, 64) for context in (0, 64, 192)]
    return {
        # the toy device's: few buckets, long prompts in chunks
        "toy": plan_of(
            Limits(32, 4, 64, 8),
            [(1, 4, 0), (1, 16, 0), (4, 4, 0), (4, 8, 0), (1, 8, 24), (2, 8, 8)],
            [(1, 8), (1, 32), (2, 16), (4, 16), (4, 32)],
        ),
        # 72 buckets of equal distances, with context
        "linear": plan_of(
            Limits(128, 8, 256, 16),
            [(b, q, c) for b in (1, 2, 4) for q in (16, 32, 48, 64) for c in (0, 32, 64, 96) if b * q <= 128],
            [(b, c) for b in (1, 4, 8) for c in range(16, 129, 16)] + [(2, 64), (2, 128), (6, 128), (3, 128)],
        ),
        "powers": plan_of(
            Limits(256, 8, 512, 16), doubled, [(b, c) for b in (1, 2, 4, 8) for c in (16, 32, 64, 128, 256)]
        ),
        # no prompt bucket has a context: nothing can be chunked, no prefix saves anything
        "whole": plan_of(
            Limits(64, 4, 256, 8), [(b, q, 0) for b in (1, 2, 4) for q in (8, 16, 32, 64)], [(2, 32), (4, 64)]
        ),
        # the end of a long prompt needs a bucket above any sensible budget, and no bucket begins late
        "steep": plan_of(Limits(96, 3, 256, 8), [(3, 8, 16), (1, 64, 8), (2, 32, 40), (1, 72, 24)], [(3, 96)]),
        # a step has hardly room for a token of each sequence, and none for long drafts
        "narrow": plan_of(Limits(32, 4, 6, 8), [(1, 4, 28), (1, 6, 26)], [(4, 32)]),
        "one": plan_of(Limits(16, 1, 16, 4), [(1, 4, 12)], [(1, 16)]),
    }


@cache
def guide_plan() -> Plan:
    """72 buckets for 8 sequences of 2,048 tokens, prompts up to 1,024 at once."""
    return make_plan(
        Limits(2048, 8, max_prompt_len=1024),
        prompt_batch=Range(1, 32, 4),
        prompt_query=Range(128, 128, 1024),
        decode_batch=Range(1, 128, 8),
        decode_context=Range(128, 128, 2048),
    )
