"""Evaluating plans on traffic: every step counted as the runtime would run it."""

from __future__ import annotations

import json
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.bucket import Bucket
from llmc.buckets.cost.bench import Bench, Measurement
from llmc.buckets.evaluation import usage
from llmc.buckets.evaluation.replay import Evaluation, evaluate
from llmc.buckets.evaluation.usage import PaddingHistogram
from llmc.buckets.limits import Limits
from llmc.buckets.lookup import prefill_path
from llmc.buckets.plan import Plan, Provenance
from llmc.buckets.report.text import comparison_text, evaluation_text
from llmc.buckets.traffic.events import DecodeRun, PromptGroup
from llmc.errors import InputError
from tests.buckets.generators import PROPERTY, small_plans
from tests.tiers import full


def plan_of(limits: Limits, prompt: list[tuple[int, int, int]], decode: list[tuple[int, int]]) -> Plan:
    known = [Bucket("prompt", *row) for row in prompt] + [Bucket("decode", batch, 1, rest) for batch, rest in decode]
    return Plan(limits, tuple(known), Provenance("by hand"))


def group(*lengths: int, cached: tuple[int, ...] | None = None) -> PromptGroup:
    return PromptGroup(lengths, cached or (0,) * len(lengths))


@st.composite
def prompt_groups(draw: st.DrawFn) -> PromptGroup:
    lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=6))
    return PromptGroup(tuple(lengths), tuple(draw(st.integers(0, length - 1)) for length in lengths))


@st.composite
def decode_runs(draw: st.DrawFn) -> DecodeRun:
    lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=6))
    return DecodeRun(len(lengths), max(lengths), sum(lengths), draw(st.integers(1, 20)))


EVENTS = st.lists(prompt_groups() | decode_runs(), max_size=12)


class Naive:
    """The same counts, one step at a time."""

    def __init__(self, plan: Plan, events: list[PromptGroup | DecodeRun]) -> None:
        self.plan = plan
        self.uses: dict[Bucket, list[int]] = {bucket: [0, 0, 0, 0] for bucket in plan.buckets}
        self.all_padding: dict[str, list[float]] = {"prompt": [], "decode": []}
        self.requests = 0
        self.uncovered = {"prompt": 0, "decode": 0}
        for event in events:
            if isinstance(event, DecodeRun):
                for step in range(event.steps):
                    self.decode(event.batch, event.longest + step, event.total + event.batch * step)
            else:
                self.prompts(event)

    def decode(self, batch: int, longest: int, total: int) -> None:
        bucket = self.plan.lookup("decode", batch, 1, longest)
        if bucket is None:
            self.uncovered["decode"] += 1
        else:
            self.count(bucket, batch, total, bucket.batch * bucket.context)

    def prompts(self, event: PromptGroup) -> None:
        self.requests += len(event.lengths)
        rows = list(zip(event.lengths, event.cached, strict=True))
        steps = self.path(rows)
        if steps is None:
            served = [row for row in rows if self.path([row]) is not None]
            self.uncovered["prompt"] += len(rows) - len(served)
            rows, steps = served, self.path(served) if served else []
        if steps is None:
            self.uncovered["prompt"] += len(rows)
        for step in steps or []:
            real = 0
            for row, (start, stop) in zip(step.rows, step.spans, strict=True):
                real += sum(index >= rows[row][1] for index in range(start, stop))
            self.count(step.bucket, len(step.rows), real, step.bucket.tokens)

    def path(self, rows):
        try:
            return prefill_path(self.plan, [length for length, _ in rows], [cached for _, cached in rows])
        except InputError:
            return None

    def count(self, bucket: Bucket, rows: int, real: int, padded: int) -> None:
        for index, number in enumerate((1, rows, real, padded)):
            self.uses[bucket][index] += number
        self.all_padding[bucket.phase].append(padded / real - 1)


def check(evaluation: Evaluation, naive: Naive) -> None:
    assert evaluation.prompt.requests == evaluation.decode.requests == naive.requests
    for phase in (evaluation.prompt, evaluation.decode):
        assert phase.uncovered == naive.uncovered[phase.phase]
        for use in phase.buckets:
            assert [use.steps, use.requests, use.real_tokens, use.padded_tokens] == naive.uses[use.bucket]
        all_padding = sorted(naive.all_padding[phase.phase])
        assert phase.steps == len(all_padding)
        for percent, found in ((50, phase.padding_p50), (95, phase.padding_p95), (99, phase.padding_p99)):
            if all_padding:
                exact = all_padding[-(-len(all_padding) * percent // 100) - 1]
                assert found == pytest.approx(exact, abs=0.000501, rel=0.000501)
            else:
                assert found is None


@PROPERTY
@given(small_plans(), EVENTS)
def test_equal_to_looking_up_every_step(plan, events):
    check(evaluate(plan, iter(events)), Naive(plan, events))


def test_pieces_of_any_size_give_the_same(monkeypatch):
    monkeypatch.setattr(usage, "EVENTS_AT_ONCE", 2)
    monkeypatch.setattr(usage, "STEPS_AT_ONCE", 3)
    monkeypatch.setattr(usage, "PATHS_KEPT", 1)

    @PROPERTY
    @given(small_plans(), EVENTS)
    def same(plan, events):
        check(evaluate(plan, events), Naive(plan, events))

    same()


def test_the_guides_request_by_hand(guide_plan):
    """Three prompts in (4, 512); 101 steps in (4, 512) until the longest has 512 tokens, 10 more in (4, 640)."""
    evaluation = evaluate(guide_plan, [group(412, 20, 300), DecodeRun(3, 412, 732, 111)])
    prompt = evaluation.prompt
    assert (prompt.requests, prompt.steps, prompt.uncovered) == (3, 1, 0)
    assert (prompt.real_tokens, prompt.padded_tokens) == (732, 2048)
    assert prompt.padding == pytest.approx((2048 - 732) / 732)
    assert prompt.padding_p50 == prompt.padding_p99 == pytest.approx(1.798, abs=0.0005)
    (use,) = prompt.hottest(5)
    assert (use.bucket, use.steps, use.requests, use.share) == (Bucket("prompt", 4, 512, 0), 1, 3, 1.0)
    decode = evaluation.decode
    real = sum(732 + 3 * step for step in range(111))
    assert (decode.steps, decode.real_tokens, decode.padded_tokens) == (111, real, 101 * 2048 + 10 * 2560)
    larger, smaller = decode.hottest(5)
    assert (larger.bucket, larger.steps, larger.requests) == (Bucket("decode", 4, 1, 512), 101, 303)
    assert larger.share == 101 * 2048 / decode.padded_tokens
    assert (smaller.bucket, smaller.steps) == (Bucket("decode", 4, 1, 640), 10)
    assert smaller.real_tokens == sum(732 + 3 * step for step in range(101, 111))
    assert (len(prompt.unused), len(decode.unused)) == (23, 46)
    assert decode.hottest(1) == (larger,)


def test_buckets_are_in_plan_order_and_unused_ones_have_no_padding(guide_plan):
    evaluation = evaluate(guide_plan, [])
    assert [use.bucket for use in evaluation.prompt.buckets] == list(guide_plan.prompt)
    assert [use.bucket for use in evaluation.decode.buckets] == list(guide_plan.decode)
    assert evaluation.prompt.unused == guide_plan.prompt
    assert evaluation.decode.hottest(3) == ()
    for phase in (evaluation.prompt, evaluation.decode):
        assert phase.padding is phase.padding_p50 is phase.padding_p95 is phase.padding_p99 is None
        assert {(use.padding, use.share) for use in phase.buckets} == {(None, 0.0)}


def test_tokens_that_are_computed_again_are_padding():
    plan = plan_of(Limits(33, 1), [(1, 16, 0), (1, 16, 16)], [(1, 33)])
    prompt = evaluate(plan, [group(20, cached=(18,))]).prompt
    assert (prompt.steps, prompt.real_tokens, prompt.padded_tokens) == (1, 2, 16)


def test_a_prompt_in_chunks_counts_once_as_a_request_and_in_every_step_of_its_buckets():
    plan = plan_of(Limits(33, 1), [(1, 16, 0), (1, 16, 16)], [(1, 33)])
    prompt = evaluate(plan, [group(20)]).prompt
    assert (prompt.requests, prompt.steps, prompt.real_tokens, prompt.padded_tokens) == (1, 2, 20, 32)
    assert [use.requests for use in prompt.buckets] == [1, 1]


def test_a_group_runs_without_its_uncovered_prompts():
    plan = plan_of(Limits(64, 4), [(2, 16, 0)], [(4, 64)])
    prompt = evaluate(plan, [group(10, 40, 12), group(40), group(5)]).prompt
    assert (prompt.requests, prompt.uncovered, prompt.steps, prompt.real_tokens) == (5, 2, 2, 27)


def test_prompts_beyond_the_limits_of_the_plan_are_uncovered():
    plan = plan_of(Limits(64, 2), [(2, 63, 0)], [(2, 64)])
    prompt = evaluate(plan, [group(5, 5, 5), group(64), group(64, 5)]).prompt
    assert (prompt.requests, prompt.uncovered, prompt.steps) == (6, 5, 1)


def test_decode_steps_above_every_bucket_are_uncovered():
    plan = plan_of(Limits(64, 4), [(4, 63, 0)], [(2, 32), (1, 40)])
    decode = evaluate(plan, [DecodeRun(2, 30, 40, 5), DecodeRun(1, 39, 39, 3), DecodeRun(3, 5, 15, 7)]).decode
    assert decode.uncovered == 2 + 1 + 7
    assert (decode.steps, decode.real_tokens) == (3 + 2, 40 + 42 + 44 + 39 + 40)


def test_decode_requests_are_those_given_or_at_most_all(guide_plan):
    events = [group(5, 6, 7), DecodeRun(2, 7, 13, 2)]
    assert evaluate(guide_plan, events).decode.requests == 3
    assert evaluate(guide_plan, events, decode_requests=lambda: 2).decode.requests == 2


def bench(phase: str) -> Bench:
    rows = [(1, 128, 0), (4, 512, 0)] if phase == "prompt" else [(1, 1, 128), (4, 1, 640)]
    measured = (Measurement(Bucket(phase, *row), seconds) for row, seconds in zip(rows, (0.01, 0.08), strict=True))
    return Bench("test device", tuple(measured))


def test_seconds_are_those_of_the_padded_steps_for_the_phases_that_were_measured(guide_plan):
    events = [group(412, 20, 300), group(100), group(100), DecodeRun(3, 412, 732, 111)]
    evaluation = evaluate(guide_plan, events, bench=bench("prompt"))
    assert evaluation.prompt.seconds == pytest.approx(0.08 + 2 * 0.01)
    assert evaluation.decode.seconds is None
    known = bench("decode")
    decode = evaluate(guide_plan, events, bench=known).decode
    assert decode.seconds == pytest.approx(101 * float(known.seconds("decode", 4, 1, 512)) + 10 * 0.08)
    assert evaluate(guide_plan, events).prompt.seconds is None


def test_the_json_has_exactly_the_documented_fields(guide_plan):
    events = [group(412, 20, 300), DecodeRun(3, 412, 732, 111)]
    document = json.loads(json.dumps(evaluate(guide_plan, events, bench=bench("prompt")).to_dict()))
    fields = {"requests", "uncovered", "steps", "real_tokens", "padded_tokens", "padding", "padding_p50", "padding_p95"}
    fields |= {"padding_p99", "ragged_padding", "unused", "buckets"}
    assert sorted(document) == ["decode", "prompt"]
    assert set(document["prompt"]) == fields | {"seconds"}
    assert set(document["decode"]) == fields
    assert document["prompt"]["padding"] == (2048 - 732) / 732
    assert document["prompt"]["unused"][0] == [1, 128, 0]
    used = next(row for row in document["prompt"]["buckets"] if row["steps"])
    assert used == {
        "batch": 4,
        "query": 512,
        "context": 0,
        "steps": 1,
        "requests": 3,
        "real_tokens": 732,
        "padded_tokens": 2048,
        "padding": (2048 - 732) / 732,
        "share": 1.0,
    }
    assert document["prompt"]["buckets"][0]["padding"] is None
    assert evaluate(guide_plan, []).to_dict()["decode"]["padding"] is None


@full
def test_a_long_stream_is_counted_in_bounded_memory(guide_plan):
    def events():
        for number in range(40_000):
            yield group(1 + number % 1000, cached=(number % 7 if number % 1000 > 7 else 0,))
            yield DecodeRun(1 + number % 4, 1000, 1000 * (1 + number % 4), 30)

    tracemalloc.start()
    evaluation = evaluate(guide_plan, events())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (evaluation.prompt.requests, evaluation.decode.steps) == (40_000, 1_200_000)
    assert peak < 40e6


# histogram


@PROPERTY
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 5000) | st.integers(0, 10**9)), min_size=1, max_size=60),
    st.integers(1, 100),
)
def test_percentiles_are_exact_to_a_tenth_of_a_point_or_a_thousandth_of_themselves(steps, percent):
    real = np.array([step for step, _ in steps])
    padded = real + np.array([extra for _, extra in steps])
    histogram = PaddingHistogram()
    half = len(steps) // 2
    histogram.add(real[:half], padded[:half])
    histogram.add(real[half:], padded[half:])
    exact = sorted(padded / real - 1)[-(-len(steps) * percent // 100) - 1]
    tolerance = 0.0005 if exact <= 10 else 0.0005 * exact
    assert abs(histogram.percentile(percent) - exact) <= tolerance * 1.001


def test_a_padding_beyond_the_last_bin_counts_as_the_last():
    histogram = PaddingHistogram()
    histogram.add(np.array([1]), np.array([2**62]))
    assert histogram.percentile(50) == pytest.approx(10 * math.exp(20))


# text


def test_the_report_says_what_was_padded_used_and_never_used(guide_plan):
    events = [group(412, 20, 300), DecodeRun(3, 412, 732, 111)]
    lines = evaluation_text(evaluate(guide_plan, events, bench=bench("prompt"))).splitlines()
    assert lines[0] == "prompt: 3 requests in 1 step"
    assert lines[1] == "padding 179.8% (steps: p50 179.8%, p95 179.8%, p99 179.8%), 732 tokens padded to 2048"
    assert lines[2] == "68.9 points of it by unequal lengths in one step, which no bucket avoids"
    assert lines.pop(3) == "0.1 s by the bench"
    assert lines[4:6] == ["bucket   steps  rows  padding   share", "4x512+0      1     3   179.8%  100.0%"]
    assert lines[7] == "never used: 23 of 24 buckets: 1x128+0 1x256+0 1x384+0 1x512+0 1x640+0 1x768+0 … 4x1024+0"
    assert lines[9].startswith("decode: 3 requests in 111 steps")
    assert any(line.startswith("4x1+640 ") for line in lines)


def test_the_report_cuts_the_table_and_names_what_is_uncovered():
    plan = plan_of(Limits(64, 4), [(1, 16, 0), (1, 32, 0)], [(4, 32)])
    report = evaluation_text(evaluate(plan, [group(10), group(30), group(60), DecodeRun(1, 32, 32, 2)]), hottest=1)
    assert "1 prompt request covered by no bucket: plan anew\n" in report
    assert "1 decode step covered by no bucket: plan anew\n" in report
    assert "\n1x32+0 " in report
    assert "\n1x16+0 " not in report
    assert report.endswith("never used: 0 of 1 buckets\n")


def test_the_report_on_no_traffic_has_no_padding(guide_plan):
    report = evaluation_text(evaluate(guide_plan, []))
    assert report.startswith("prompt: 0 requests in 0 steps\nnever used: 24 of 24 buckets: 1x128+0")
    assert "padding" not in report


def test_a_comparison_has_a_row_for_every_plan_and_phase(guide_plan):
    small = plan_of(Limits(2048, 4), [(4, 512, 0)], [(4, 600)])
    events = [group(412, 20, 300), DecodeRun(3, 412, 732, 111), DecodeRun(1, 600, 600, 2)]
    named = [("guide", evaluate(guide_plan, events)), ("one", evaluate(small, events))]
    assert comparison_text(named).splitlines() == [
        "plan   phase   graphs  steps  padding     p50     p95     p99  unused",
        "guide  prompt      24      1   179.8%  179.8%  179.8%  179.8%      23",
        "guide  decode      48    113   131.9%  135.4%  174.2%  178.6%      45",
        "one    prompt       1      1   179.8%  179.8%  179.8%  179.8%       0",
        "one    decode       1    112   168.4%  167.6%  222.6%  227.9%       0",
        "one: 1 decode step covered by no bucket: plan anew",
    ]
    silent = comparison_text([("guide", evaluate(guide_plan, events[:1]))]).splitlines()
    assert silent[2].split() == ["guide", "decode", "48", "0", "–", "–", "–", "–", "48"]
    timed = [("guide", evaluate(guide_plan, events, bench=bench("prompt")))]
    lines = comparison_text(timed).splitlines()
    assert lines[0].endswith("unused  seconds")
    assert lines[1].endswith("  23      0.1")
    assert lines[2].endswith("  45")
