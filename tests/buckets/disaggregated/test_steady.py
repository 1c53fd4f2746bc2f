"""The disaggregated of two devices that always have work: what bounds it, and from which lengths on it pays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.disaggregated.device import APART, Link, Sharing, Stage
from llmc.buckets.disaggregated.steady import break_even, steady
from llmc.errors import InputError
from tests.buckets.disaggregated.devices import links, stage, stages

FREE = Link(1, 1e9)
SHARED = Sharing(shared=True)
lengths = st.integers(1, 500)


def test_a_prompt_takes_its_bytes_and_the_links_latency() -> None:
    link = Link(46_080, 2.0, latency_s=0.001)
    assert link.total_s(1024) == pytest.approx(0.001 + 46_080 * 1024 / 2e9)


@given(stages, links, lengths, lengths, st.integers(1, 32))
def test_two_equal_devices_gain_at_most_twice_apart_and_nothing_on_one_machine(
    one: Stage, link: Link, prompt: int, output: int, slots: int
) -> None:
    assert steady(one, one, link, prompt, output, slots, APART).gain <= 2 + 1e-9
    assert steady(one, one, FREE, prompt, output, slots, APART).gain >= 1 - 1e-6
    assert steady(one, one, link, prompt, output, slots, SHARED).gain <= 1 + 1e-9


@given(stages, stages, links, lengths, lengths, st.integers(1, 32), st.floats(0.5, 3))
def test_the_slower_stage_bounds_a_disaggregated_and_sharing_never_helps(
    x: Stage, y: Stage, link: Link, prompt: int, output: int, slots: int, contention: float
) -> None:
    apart = steady(x, y, link, prompt, output, slots, APART).disaggregated
    assert apart <= 1 / (x.prompt_s(prompt) + link.moving_s(prompt) / 2) * (1 + 1e-9)
    shared = steady(x, y, link, prompt, output, slots, Sharing(shared=True, contention=contention)).disaggregated
    assert shared <= apart * (1 + 1e-9)
    assert steady(x, y, link, prompt, output, slots, Sharing(True, 0.5)).disaggregated == pytest.approx(apart)


@given(stages, stages, links, lengths, lengths, st.integers(1, 32), st.booleans(), st.floats(1, 10))
def test_a_faster_link_never_makes_a_disaggregated_slower(
    x: Stage, y: Stage, link: Link, prompt: int, output: int, slots: int, shared: bool, faster: float
) -> None:
    slow, fast = (
        steady(x, y, one, prompt, output, slots, Sharing(shared)).disaggregated
        for one in (link, replace(link, gb_per_s=link.gb_per_s * faster))
    )
    assert fast >= slow * (1 - 1e-9)


def test_on_one_machine_a_disaggregated_pays_where_each_device_is_the_better_one_at_its_half() -> None:
    prompts, decodes = stage("prompts", token=0.001, row=0.01), stage("decodes", token=0.004, row=0.001)
    assert steady(prompts, decodes, FREE, 200, 100, 4, SHARED).gain > 1
    assert steady(decodes, prompts, FREE, 200, 100, 4, SHARED).gain < 1


def test_break_even_says_from_which_prompts_on_it_pays() -> None:
    prompts = stage("prompts", fixed=0.2, token=0.0001, row=0.01)
    decodes = stage("decodes", fixed=0.005, token=0.004, row=0.0005)
    found = {one.output: one for one in break_even(prompts, decodes, FREE, 4, SHARED, 2048)}
    assert list(found) == [16, 64, 256, 1024]
    assert found[16].least is not None
    assert found[16].least > 16, "short prompts are faster where they are decoded"
    never = break_even(decodes, prompts, FREE, 4, SHARED, 2048)
    assert all(one.least is one.most is None and one.gain <= 1 for one in never)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Link(0, 1.0), "0 bytes"),
        (lambda: Link(1, 0.0), "0.0 GB/s moves nothing"),
        (lambda: Link(1, float("nan")), "moves nothing"),
        (lambda: Link(1, 1.0, -1.0), "latency"),
        (lambda: Sharing(True, 0.4), "contention of 0.4"),
        (lambda: replace(stage(), overhead_s=-1.0), "overhead of -1.0 s"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()  # type: ignore[operator]
