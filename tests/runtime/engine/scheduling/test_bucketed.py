"""What a caller of the scheduler can rely on, case by case; test_simulation.py has it for any case."""

from __future__ import annotations

from itertools import groupby

import pytest

from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan, Provenance
from llmc.errors import ArtifactError, InputError
from llmc.runtime.engine.scheduling.base import Occupancy, ScheduledBatch, SchedulerConfig
from llmc.runtime.engine.scheduling.bucketed import BucketScheduler
from tests.runtime.engine.scheduling.plans import plans
from tests.runtime.engine.scheduling.watched import Watched, prompts_of


def watched(plan: str = "toy", slots: int | None = None, **config: int | bool | None) -> Watched:
    chosen = plans()[plan]
    live = int(config.pop("max_num_seqs", None) or chosen.limits.max_num_seqs)
    return Watched(chosen, SchedulerConfig(live, slots or live + 1, **config), lambda tokens: 1000 + len(tokens))  # type: ignore[arg-type]


def never(client: object) -> bool:
    return False


def always(client: object) -> bool:
    return True


def phases(works: list[ScheduledBatch]) -> list[tuple[str, int]]:
    """Runs of steps of one phase, with their number."""
    return [(phase, len(list(run))) for phase, run in groupby(work.phase for work in works)]


class TestLife:
    def test_a_prompt_then_a_token_a_step(self) -> None:
        w = watched()
        w.add(7, [1, 2, 3])
        works = w.drain(lambda client: len(client.tokens) == 6)
        assert [(work.phase, str(work.bucket)) for work in works] == [
            ("prompt", "prompt[1x4+0]"), ("decode", "decode[1x1+8]"), ("decode", "decode[1x1+8]"),
        ]  # fmt: skip
        assert [tuple(row.tokens) for work in works for row in work.rows] == [(1, 2, 3), (1003,), (1004,)]
        assert works[0].admitted == ((7, 0),)
        assert w.ended[7] == [1, 2, 3, 1003, 1004, 1005]

    def test_nothing_to_do_is_none_again_and_again(self) -> None:
        w = watched()
        assert w.step(never) is None
        assert w.step(never) is None

    def test_a_new_sequence_joins_those_that_decode(self) -> None:
        w = watched()
        w.add(0, [1, 2, 3])
        w.step(never)
        w.add(1, [4, 5, 6])
        assert [tuple(row.sequence for row in work.rows) for work in (w.step(never), w.step(never)) if work] == [
            (1,), (0, 1),
        ]  # fmt: skip

    def test_no_more_than_max_num_seqs_are_live(self) -> None:
        w = watched(max_num_seqs=2, slots=8)
        for i in range(3):
            w.add(i, [i] * 3)
        w.step(never)
        assert (w.scheduler.occupancy.waiting, w.scheduler.occupancy.prefilling + w.scheduler.occupancy.decoding) == (
            1,
            2,
        )

    def test_equal_calls_give_equal_work(self) -> None:
        def play() -> list[ScheduledBatch]:
            w = watched("linear")
            for i in range(12):
                w.add(i, [i % 3] * (5 + 9 * i), priority=i % 2)
            return w.drain(lambda client: len(client.tokens) % 5 == 0)

        assert play() == play()


class TestOrder:
    @pytest.mark.parametrize(("overtake", "order"), [(0, [0, 1, 2, 3, 4]), (2, [0, 1, 2, 4, 3]), (64, [0, 4, 1, 2, 3])])
    def test_priority_overtakes_so_many_arrivals_and_no_more(self, overtake: int, order: list[int]) -> None:
        w = watched(max_num_seqs=1, overtake=overtake)
        w.add(0, [1])
        w.step(never)
        for i in (1, 2, 3):
            w.add(i, [1])
        w.add(4, [1], priority=-1)
        works = w.drain(lambda client: len(client.tokens) == 3)
        assert [0] + [s for work in works for s, _ in work.admitted] == order

    def test_prompts_take_turns(self) -> None:
        w = watched("linear", exact=True, prompt_chunk=16)
        w.add(0, [0] * 40)
        w.add(1, [1] * 40)
        assert prompts_of(w.drain(always)) == [(0,), (1,), (0,), (1,), (0,), (1,)]


class TestPrefillBudget:
    @pytest.mark.parametrize(("budget", "between"), [(1, 1), (16, 1), (31, 1), (32, 2), (64, 4)])
    def test_so_many_prompt_tokens_run_between_decode_steps(self, budget: int, between: int) -> None:
        w = watched("linear", exact=True, prompt_chunk=16, prefill_budget=budget, min_prefix=0)
        w.add(0, [0])
        w.step(never)
        w.add(1, [1] * 112)
        runs = phases([work for work in (w.step(never) for _ in range(20)) if work])
        size = min(16, budget)
        assert runs[0] == ("prompt", between)
        assert runs[1] == ("decode", 1)
        assert between * size <= max(budget, size)

    def test_one_step_above_the_budget_is_allowed_when_no_smaller_one_serves(self) -> None:
        w = watched("whole", prefill_budget=16)
        w.add(0, [0])
        w.step(never)
        w.add(1, [1] * 40)
        w.add(2, [2] * 40)
        works = [work for work in (w.step(never) for _ in range(4)) if work]
        assert [str(work.bucket) for work in works] == [
            "prompt[1x64+0]", "decode[4x1+64]", "prompt[1x64+0]", "decode[4x1+64]",
        ]  # fmt: skip

    def test_a_budget_used_for_sequences_that_ended_is_not_held_against_the_next(self) -> None:
        w = watched("linear", exact=True, prompt_chunk=16, prefill_budget=16, min_prefix=0)
        w.add(0, [0])
        w.step(never)
        w.add(1, [1] * 32)
        w.step(never)
        w.cancel(0)
        w.step(never)
        w.add(2, [2] * 16)
        assert phases([work for work in (w.step(never), w.step(never)) if work]) == [("prompt", 1), ("decode", 1)]

    def test_with_nothing_to_decode_prompts_run_freely(self) -> None:
        w = watched("powers", prefill_budget=16)
        w.add(0, [0] * 100)
        first = w.step(never)
        assert first is not None and str(first.bucket) == "prompt[1x64+0]"


class TestPrefixes:
    def test_a_conversation_goes_on_in_its_slot(self) -> None:
        w = watched(min_prefix=1)
        w.add(0, [1, 2, 3])
        w.drain(lambda client: len(client.tokens) == 8)
        w.add(1, [*w.ended[0], 4])
        works = w.drain(always)
        assert works[0].admitted == ((1, 7),)
        assert works[0].copies == ()
        assert works[0].rows[0].start == 7

    def test_a_shared_beginning_is_copied_from_a_live_sequence(self) -> None:
        w = watched("linear")
        w.add(0, [1] * 40)
        w.step(never)
        w.add(1, [1] * 32 + [2])
        work = w.step(never)
        assert work is not None and work.admitted == ((1, 32),)
        assert [(c.source, c.target, c.length) for c in work.copies] == [(0, 1, 32)]

    def test_what_no_bucket_can_take_over_is_not_copied(self) -> None:
        w = watched("whole", min_prefix=1)
        w.add(0, [1] * 40)
        w.step(never)
        w.add(1, [1] * 40)
        work = w.step(never)
        assert work is not None and work.admitted == ((1, 0),) and work.copies == ()

    @pytest.mark.parametrize(("min_prefix", "saved"), [(0, 0), (20, 20), (21, 0)])
    def test_shorter_prefixes_than_min_prefix_are_computed(self, min_prefix: int, saved: int) -> None:
        w = watched("linear", exact=True, min_prefix=min_prefix)
        w.add(0, [1] * 20)
        w.drain(always)
        w.add(1, [1] * 20 + [2])
        assert w.drain(always)[0].admitted == ((1, saved),)

    def test_a_prefix_is_copied_from_retained_tokens_and_leaves_them_whole(self) -> None:
        w = watched("linear", min_prefix=1, exact=True)
        w.add(0, [1] * 40)
        w.drain(always)
        w.add(1, [1] * 10 + [2])
        w.drain(always)
        w.add(2, [1] * 40 + [3])
        assert w.drain(always)[0].admitted == ((2, 40),)

    def test_retained_slots_are_given_up_for_new_sequences(self) -> None:
        w = watched("linear", min_prefix=1, slots=9)
        for i in range(30):
            w.add(i, [100 + i] * 20)
        w.drain(always)
        assert w.scheduler.occupancy == Occupancy(0, 0, 0, 9, 0, 0, 180)


class TestGroups:
    @pytest.mark.parametrize("min_prefix", [0, 16])
    def test_siblings_wait_for_the_first_and_copy_its_prompt(self, min_prefix: int) -> None:
        w = watched("linear", min_prefix=min_prefix)
        for i in range(4):
            w.add(i, [5] * 10, group=3)
        w.add(4, [6] * 10)
        first, second = w.step(never), w.step(never)
        assert first is not None and [s for s, _ in first.admitted] == [0, 4]
        assert second is not None and second.admitted == ((1, 9), (2, 9), (3, 9))
        assert [(row.sequence, row.start) for row in second.rows] == [(1, 9), (2, 9), (3, 9)]

    def test_the_next_sibling_leads_when_the_first_is_cancelled(self) -> None:
        w = watched("linear", exact=True, prompt_chunk=8, min_prefix=0)
        for i in range(3):
            w.add(i, [5] * 20, group=1)
        w.step(never)
        w.cancel(0)
        works = w.drain(always)
        assert [work.admitted for work in works if work.admitted] == [((1, 0),), ((2, 0),)]

    def test_siblings_run_together_where_no_bucket_can_take_over(self) -> None:
        w = watched("whole")
        for i in range(4):
            w.add(i, [5] * 20, group=1)
        assert prompts_of(w.drain(always)) == [(0, 1, 2, 3)]


class TestCancel:
    def test_a_waiting_sequence_is_forgotten(self) -> None:
        w = watched(max_num_seqs=1)
        w.add(0, [1])
        w.add(1, [1])
        w.step(never)
        w.cancel(1)
        assert all(row.sequence == 0 for work in w.drain() for row in work.rows)

    def test_a_decoding_sequences_slot_is_filled_by_the_last(self) -> None:
        w = watched("toy", min_prefix=0)
        for i in range(3):
            w.add(i, [i, i, i])
        w.step(never)
        w.cancel(0)
        work = w.step(never)
        assert work is not None
        assert [row.sequence for row in work.rows] == [2, 1]
        assert [(c.source, c.target, c.length) for c in work.copies] == [(2, 0, 3)]

    @pytest.mark.parametrize("after", [0, 1, 2, 3])
    def test_while_a_step_runs_its_token_is_ignored(self, after: int) -> None:
        w = watched("linear", exact=True, prompt_chunk=8)
        w.add(0, [1] * 16)
        w.add(1, [2] * 16)
        for _ in range(after):
            w.step(never)
        w.step(never, meanwhile=lambda: w.cancel(0))
        assert all(row.sequence == 1 for work in w.drain() for row in work.rows)

    def test_an_unknown_id_is_fine(self) -> None:
        watched().cancel(12)

    def test_a_cancelled_id_may_come_back(self) -> None:
        w = watched()
        w.add(0, [1, 2, 3])

        def meanwhile() -> None:
            w.cancel(0)
            w.add(0, [4, 5])

        w.step(never, meanwhile)
        assert w.drain(always)[0].rows[0].tokens.tolist() == [4, 5]  # type: ignore[attr-defined]


def test_a_step_that_failed_leaves_nothing_behind_after_reset() -> None:
    w = watched(min_prefix=1)
    for i in range(6):
        w.add(i, [1, 2, 3], group=0)
    w.step(never)
    w.step(never)
    assert w.scheduler.next() is not None
    w.scheduler.reset()
    w.clients.clear()
    w.cache = [[] for _ in w.cache]
    assert w.step(never) is None
    assert w.scheduler.occupancy == Occupancy(0, 0, 0, 0, 5, 0, 0)
    w.add(0, [1, 2, 3, 4], group=0)
    assert [work.admitted for work in w.drain(always)] == [((0, 0),)]


def test_every_slot_live_a_short_prompt_waits_for_the_long_one_below_it() -> None:
    w = watched("linear", exact=True, max_num_seqs=2, slots=2, prompt_chunk=16)
    w.add(0, [1] * 64)
    w.add(1, [2] * 8)
    works = w.drain(lambda client: len(client.tokens) % 5 == 0)
    assert prompts_of(works) == [(0,), (1,), (0,), (0,), (0,)]
    assert phases(works)[0] == ("prompt", 5)


def test_prompts_that_hold_up_others_go_first() -> None:
    w = watched("linear", exact=True, max_num_seqs=3, slots=3, prompt_chunk=16)
    for i, length in enumerate((64, 64, 8)):
        w.add(i, [i] * length)
    assert [s for (s,) in prompts_of(w.drain())] == [0, 1, 2, 0, 0, 0, 1, 1, 1]


class TestRefusals:
    def test_an_id_in_use(self) -> None:
        w = watched()
        w.add(0, [1])
        with pytest.raises(InputError, match="sequence 0 is queued or running already"):
            w.scheduler.add(0, [1])

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (SchedulerConfig(0, 4), "max_num_seqs 0 must be at least 1"),
            (SchedulerConfig(5, 5), "max_num_seqs 5 is more than the plan's max_num_seqs, 4"),
            (SchedulerConfig(4, 3), "slots 3 must be at least 4"),
            (SchedulerConfig(4, 4, prefill_budget=0), "prefill_budget 0"),
            (SchedulerConfig(4, 4, prompt_chunk=0), "prompt_chunk 0"),
            (SchedulerConfig(4, 4, min_prefix=-1), "min_prefix -1"),
            (SchedulerConfig(4, 4, overtake=-1), "overtake -1"),
        ],
    )
    def test_a_config_out_of_range(self, config: SchedulerConfig, message: str) -> None:
        with pytest.raises(InputError, match=message):
            BucketScheduler(plans()["toy"], config)

    def test_a_plan_with_gaps_unless_any_shape_runs(self) -> None:
        buckets = (Bucket("prompt", 1, 32, 0), Bucket("decode", 2, 1, 16), Bucket("decode", 1, 1, 32))
        plan = Plan(Limits(32, 2), buckets, Provenance("test"))
        with pytest.raises(ArtifactError, match="no bucket for decode batch 2"):
            BucketScheduler(plan, SchedulerConfig(2, 2))
        BucketScheduler(plan, SchedulerConfig(2, 2, exact=True))

    def test_a_sequence_that_outgrows_max_model_len(self) -> None:
        scheduler = BucketScheduler(plans()["one"], SchedulerConfig(1, 1))
        scheduler.add(0, [1] * 15)
        with pytest.raises(RuntimeError, match="16 cached tokens was not finished at max_model_len"):
            for _ in range(10):
                work = scheduler.next()
                assert work is not None
                scheduler.complete(work, {0: [1]} if work.rows[0].emits else {}, set())

    def test_calls_out_of_turn(self) -> None:
        scheduler = BucketScheduler(plans()["one"], SchedulerConfig(1, 1))
        scheduler.add(0, [1])
        work = scheduler.next()
        assert work is not None
        with pytest.raises(RuntimeError, match="before complete"):
            scheduler.next()
        scheduler.complete(work, {0: [1]}, set())
        with pytest.raises(RuntimeError, match="did not give last"):
            scheduler.complete(work, {0: [1]}, set())
