"""Steps of rows of any lengths, and the pool of tokens that slots share; test_simulation.py has it for any case."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from llmc.errors import InputError
from llmc.runtime.engine.scheduling import open_scheduler
from llmc.runtime.engine.scheduling.base import ScheduledBatch, SchedulerConfig
from llmc.runtime.engine.scheduling.slots import Copy
from tests.runtime.engine.scheduling.plans import plans
from tests.runtime.engine.scheduling.watched import Client, Watched


def watched(plan: str = "linear", slots: int | None = None, *, drafts: int = 0, **config: int | None) -> Watched:
    """128 tokens a sequence, 8 of them, 128 prompt tokens a step; "narrow": 32, 4, and 6 of any kind."""
    chosen = plans()[plan]
    live = int(config.pop("max_num_seqs", None) or chosen.limits.max_num_seqs)
    built = SchedulerConfig(live, slots or live + 1, exact=True, ragged=True, **config)  # type: ignore[arg-type]
    return Watched(chosen, built, lambda tokens: 1000 + len(tokens), drafts=drafts, wrong=1000)


def never(client: Client) -> bool:
    return False


def always(client: Client) -> bool:
    return True


def shape(work: ScheduledBatch | None) -> list[tuple[int, int, int]]:
    """(sequence, first token, tokens) of each row."""
    assert work is not None
    return [(row.sequence, row.start, len(row.tokens)) for row in work.rows]


class TestSteps:
    def test_prompts_of_any_length_share_a_step(self) -> None:
        w = watched()
        for i, length in enumerate((5, 17, 30)):
            w.add(i, [i] * length)
        work = w.step(never)
        assert shape(work) == [(0, 0, 5), (1, 0, 17), (2, 0, 30)]
        assert work is not None and work.phase == "prompt" and all(row.emits for row in work.rows)

    def test_a_prompt_that_does_not_fit_the_step_is_cut_and_goes_first_in_the_next(self) -> None:
        w = watched()
        for i, length in enumerate((100, 40, 30)):
            w.add(i, [i] * length)
        assert shape(w.step(never)) == [(0, 0, 100), (1, 0, 28)]
        assert shape(w.step(never)) == [(0, 100, 1), (1, 28, 12), (2, 0, 30)]

    def test_who_decodes_has_a_row_in_every_step(self) -> None:
        w = watched(prefill_budget=16)
        w.add(0, [0] * 8)
        w.step(never)
        w.add(1, [1] * 40)
        w.add(2, [2] * 5)
        works = [w.step(never) for _ in range(4)]
        assert [shape(work) for work in works] == [
            [(0, 8, 1), (1, 0, 16)],
            [(0, 9, 1), (1, 16, 16)],
            [(0, 10, 1), (1, 32, 8), (2, 0, 5)],
            [(0, 11, 1), (1, 40, 1), (2, 5, 1)],
        ]
        assert [work.phase for work in works if work] == ["prompt", "prompt", "prompt", "decode"]
        assert [[row.emits for row in work.rows] for work in works[:1] if work] == [[True, False]]

    def test_max_num_batched_tokens_bounds_prompts_and_decode_together(self) -> None:
        w = watched("narrow")
        for i in range(3):
            w.add(i, [i])
        w.step(never)
        w.add(3, [3] * 20)
        assert shape(w.step(never)) == [(0, 1, 1), (1, 1, 1), (2, 1, 1), (3, 0, 3)]

    def test_nobody_moves_when_a_lower_slot_gets_free(self) -> None:
        w = watched(min_prefix=0)
        for i in range(3):
            w.add(i, [i] * 4)
        w.step(never)
        w.cancel(0)
        work = w.step(never)
        assert work is not None and [(row.sequence, row.slot) for row in work.rows] == [(1, 1), (2, 2)]
        assert work.copies == ()

    @pytest.mark.parametrize(("chunk", "tokens"), [(None, 128), (24, 24), (1000, 128)])
    def test_with_nothing_to_decode_a_step_takes_the_largest_prompt_bucket_or_the_chunk(
        self, chunk: int | None, tokens: int
    ) -> None:
        w = watched(prompt_chunk=chunk, prefill_budget=8)
        w.add(0, [0] * 100)
        w.add(1, [1] * 100)
        assert sum(count for _, _, count in shape(w.step(never))) == tokens


class TestBeginnings:
    def test_prompts_that_begin_alike_and_come_together_compute_their_beginning_once(self) -> None:
        w = watched()
        for i in range(4):
            w.add(i, [7] * 40 + [i] * 8)
        first, second = w.step(never), w.step(never)
        assert shape(first) == [(0, 0, 48)]
        assert shape(second) == [(0, 48, 1), (1, 40, 8), (2, 40, 8), (3, 40, 8)]
        assert second is not None
        assert second.admitted == ((1, 40), (2, 40), (3, 40))
        assert second.copies == (Copy(0, 1, 40), Copy(0, 2, 40), Copy(0, 3, 40))

    @pytest.mark.parametrize(("shared", "waits"), [(15, False), (16, True)])
    def test_a_beginning_shorter_than_min_prefix_is_not_waited_for(self, shared: int, waits: bool) -> None:
        w = watched()
        w.add(0, [7] * shared + [0] * 8)
        w.add(1, [7] * shared + [1] * 8)
        assert len(shape(w.step(never))) == (1 if waits else 2)

    def test_answers_to_one_prompt_compute_it_once_also_without_reuse(self) -> None:
        w = watched(min_prefix=0)
        for i in range(3):
            w.add(i, [7] * 10, group=0)
        w.add(3, [7] * 10)
        assert shape(w.step(never)) == [(0, 0, 10)]
        assert shape(w.step(never)) == [(0, 10, 1), (1, 9, 1), (2, 9, 1), (3, 0, 10)]

    def test_a_conversation_goes_on_in_its_slot(self) -> None:
        w = watched(min_prefix=1)
        w.add(0, [1, 2, 3])
        w.drain(lambda client: len(client.tokens) == 8)
        w.add(1, [*w.ended[0], 4])
        (work, *_) = w.drain(always)
        assert (work.admitted, work.copies, work.rows[0].slot) == (((1, 7),), (), 0)

    def test_what_goes_on_beyond_the_shared_beginning_stays_where_there_is_another_slot(self) -> None:
        w = watched(min_prefix=1)
        w.add(0, [1] * 40)
        w.drain(always)
        w.add(1, [1] * 10 + [2])
        assert w.drain(always)[0].copies == (Copy(0, 1, 10),)
        w.add(2, [1] * 40 + [3])
        assert w.drain(always)[0].admitted == ((2, 40),)


class TestPool:
    def test_a_sequence_waits_until_the_pool_has_room_for_all_it_may_become(self) -> None:
        w = watched(cache_tokens=64, min_prefix=0)
        w.add(0, [0] * 10, budget=31)  # 40 places: the last token is never put into the cache
        w.add(1, [1] * 10, budget=16)  # 25
        w.add(2, [2] * 10, budget=2)  # 11, and would fit
        assert shape(w.step(never)) == [(0, 0, 10)]
        w.cancel(0)
        assert shape(w.step(never)) == [(1, 0, 10), (2, 0, 10)]

    def test_reservations_are_whole_blocks(self) -> None:
        w = watched(cache_tokens=64, block_tokens=32, min_prefix=0)
        for i in range(3):
            w.add(i, [i] * 10, budget=10)
        assert shape(w.step(never)) == [(0, 0, 10), (1, 0, 10)]

    def test_retained_tokens_give_way_the_oldest_first(self) -> None:
        w = watched(cache_tokens=60, min_prefix=1)
        for i in range(3):
            w.add(i, [100 + i] * 20, budget=1)
            w.drain(always)
        assert w.scheduler.occupancy.retained_tokens == 60
        w.add(3, [7] * 20, budget=11)
        work = w.step(never)
        assert work is not None and work.copies[-2:] == (Copy(0, 0, 0), Copy(1, 1, 0))
        assert w.scheduler.occupancy.retained_tokens == 20

    def test_an_ended_sequence_gives_back_what_it_did_not_use_and_all_of_it_without_reuse(self) -> None:
        for least, kept in ((0, 0), (1, 10)):
            w = watched(cache_tokens=128, min_prefix=least)
            w.add(0, [0] * 10)
            w.step(always)
            w.add(1, [1] * 10, budget=1)
            work = w.step(always)
            assert work is not None and work.copies == (Copy(0, 0, kept),)

    def test_a_beginning_that_fits_only_once_is_taken_over_in_its_slot(self) -> None:
        w = watched(cache_tokens=64, min_prefix=1)
        w.add(0, [1] * 40, budget=1)
        w.drain(always)
        w.add(1, [1] * 30 + [2] * 10, budget=1)
        work = w.step(always)
        assert work is not None and (work.admitted, work.rows[0].slot) == (((1, 30),), 0)
        assert work.copies == (Copy(0, 0, 40), Copy(0, 0, 30))

    def test_what_can_never_fit_is_refused(self) -> None:
        w = watched(cache_tokens=64, block_tokens=16)
        with pytest.raises(
            InputError, match="prompt of 60 tokens and its output take 65 tokens; the KV cache holds 64"
        ):
            w.scheduler.add(0, [0] * 60, budget=6)
        w.add(0, [0] * 60, budget=5)
        w.drain()

    def test_all_slots_are_emptied_first_since_warming_up_may_have_filled_them(self) -> None:
        w = watched(cache_tokens=64, max_num_seqs=2)
        w.add(0, [0] * 4, budget=1)
        work = w.step(never)
        assert work is not None and work.copies == (Copy(0, 0, 0), Copy(1, 1, 0), Copy(2, 2, 0))

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (SchedulerConfig(2, 2, exact=True, cache_tokens=64), "cache_tokens 64: only a ragged executor's slots"),
            (SchedulerConfig(2, 2, True, True, 8, 16), "cache_tokens 8 is less than one block of 16 tokens"),
            (SchedulerConfig(2, 2, True, True, 8, 0), "block_tokens 0 must be at least 1"),
        ],
    )
    def test_a_pool_that_makes_no_sense_is_refused(self, config: SchedulerConfig, message: str) -> None:
        with pytest.raises(InputError, match=message):
            open_scheduler(plans()["toy"], config)


class TestDrafts:
    def test_every_decoding_sequence_brings_its_drafts(self) -> None:
        w = watched(drafts=3)
        for i in range(2):
            w.add(i, [i] * 4)
        w.step(never)
        work = w.step(never)
        assert shape(work) == [(0, 4, 4), (1, 4, 4)]
        assert work is not None and [row.drafted for row in work.rows] == [3, 3]
        assert w.clients[0].tokens[4:] == [1004, 1005, 1006, 1007, 1008]
        assert shape(w.step(never)) == [(0, 8, 4), (1, 8, 4)], "after the token behind the drafts"

    def test_steps_with_prompts_have_none(self) -> None:
        w = watched(drafts=3)
        w.add(0, [0] * 4)
        w.step(never)
        w.add(1, [1] * 4)
        assert shape(w.step(never)) == [(0, 4, 1), (1, 0, 4)]

    def test_all_rows_together_stay_within_max_num_batched_tokens(self) -> None:
        w = watched("narrow", drafts=3)
        for i in range(2):
            w.add(i, [i])
        w.step(never)
        assert shape(w.step(never)) == [(0, 1, 4), (1, 1, 2)]

    def test_what_was_drafted_in_vain_is_written_over(self) -> None:
        built: list[int] = []

        def wrong(sequence: int, tokens: array[int], most: int) -> Sequence[int]:
            built.append(len(tokens))
            return [0, 0][:most]

        scheduler = open_scheduler(plans()["linear"], SchedulerConfig(1, 1, exact=True, ragged=True), wrong)
        scheduler.add(0, [5, 6, 7])
        for start, count in ((0, 3), (3, 3), (4, 3)):
            work = scheduler.next()
            assert work is not None and (work.rows[0].start, len(work.rows[0].tokens)) == (start, count)
            scheduler.complete(work, {0: [9]}, set())
        assert built == [4, 5]

    def test_one_row_alone_where_rows_cannot_differ(self) -> None:
        """Executors that run exact rectangles take several tokens over a past in one row only."""
        plan = plans()["linear"]
        w = Watched(plan, SchedulerConfig(2, 2, exact=True), lambda tokens: 1000 + len(tokens), drafts=3, wrong=1000)
        for i in range(2):
            w.add(i, [i] * 4)
        w.step(never)
        w.step(never)
        assert shape(w.step(never)) == [(0, 4, 1), (1, 4, 1)]
        w.cancel(1)
        assert shape(w.step(never)) == [(0, 5, 4)]
