"""Which part of which prompts runs next."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.limits import Limits
from llmc.buckets.lookup import prefill_path
from llmc.runtime.engine.scheduling.base import SchedulerConfig
from llmc.runtime.engine.scheduling.bucketed import PromptSteps
from llmc.runtime.engine.scheduling.queue import ScheduledSequence
from tests.runtime.engine.scheduling.plans import plan_of, plans


def prompts(*lengths: int) -> list[ScheduledSequence]:
    return [ScheduledSequence(i, array("q", range(n)), n, i, i) for i, n in enumerate(lengths)]


def prefill(plan: str, **config: int | bool | None) -> PromptSteps:
    chosen = plans()[plan]
    return PromptSteps(chosen, SchedulerConfig(chosen.limits.max_num_seqs, chosen.limits.max_num_seqs, **config))  # type: ignore[arg-type]


@given(st.sampled_from(["toy", "linear", "powers", "whole", "steep", "one"]), st.data())
def test_alone_a_prompt_runs_along_its_path(name: str, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, plans()[name].limits.longest_prompt))
    cached = data.draw(st.integers(0, length - 1))
    (prompt,) = prompts(length)
    prompt.cached = cached
    steps = prefill(name)
    assert steps.start(length, cached, False) == prefill_path(plans()[name], [length], [cached])[0].spans[0][0]
    for expected in prefill_path(plans()[name], [length], [cached]):
        step = steps.step([prompt], decoding=False)
        assert (step.bucket, step.spans) == (expected.bucket, expected.spans)
        steps.ran(prompt, step.spans[0])
    assert prompt.cached == length


def test_neighbours_share_a_step_that_includes_the_first() -> None:
    step = prefill("toy").step(prompts(3, 4, 2), decoding=False)
    assert [s.id for s in step.sequences] == [0, 1, 2]
    assert str(step.bucket) == "prompt[4x4+0]"
    assert step.tokens == 16


def test_while_others_decode_buckets_above_the_budget_are_left_out() -> None:
    steps = prefill("linear", prefill_budget=32)
    (prompt,) = prompts(100)
    assert str(steps.step([prompt], decoding=False).bucket) == "prompt[1x64+0]"
    assert str(steps.step([prompt], decoding=True).bucket) == "prompt[1x32+0]"


def test_a_prompt_that_the_budget_does_not_cover_runs_in_the_smallest_that_does() -> None:
    plan = plan_of(Limits(128, 4, 512, 16), [(4, 16, 0), (4, 64, 0), (1, 64, 0), (1, 127, 0)], [(4, 128)])
    steps = PromptSteps(plan, SchedulerConfig(4, 4, prefill_budget=32))
    step = steps.step(prompts(60, 60), decoding=True)
    assert (str(step.bucket), [s.id for s in step.sequences]) == ("prompt[1x64+0]", [0])
    assert str(steps.step(prompts(100), decoding=True).bucket) == "prompt[1x127+0]"


@pytest.mark.parametrize(
    ("chunk", "budget", "decoding", "expected"),
    [(None, 512, False, 100), (None, 48, True, 48), (32, 512, True, 32), (32, 512, False, 32), (64, 8, True, 8)],
)
def test_exact_shapes_run_one_prompt_in_chunks(chunk: int | None, budget: int, decoding: bool, expected: int) -> None:
    steps = prefill("linear", exact=True, prompt_chunk=chunk, prefill_budget=budget)
    step = steps.step(prompts(100, 100), decoding=decoding)
    assert (step.bucket, step.spans, step.tokens) == (None, ((0, expected),), expected)
    assert steps.start(100, 57, decoding) == 57
