"""The steps of traffic, in the runner's groups and in blocks."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.traffic.chunked_schedule import Chunk, MixedSteps, chunked_steps
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.step_time import AssumedStepTime
from llmc.integrations.base import GraphDemand
from llmc.integrations.vllm_gaudi import demands
from llmc.integrations.vllm_gaudi.demands import SimulatedBlocks
from tests.integrations.vllm_gaudi.setups import GAUDI, setup, view
from tests.tiers import examples


@given(st.lists(st.integers(0, 700), min_size=1, max_size=6), st.integers(1, 300), st.sampled_from([1, 16, 128]))
def test_blocks_of_a_run_are_those_of_its_steps(cached: list[int], steps: int, block: int) -> None:
    least, counts = demands.blocks(np.array(cached), steps, block)
    each = [sum(-(-(tokens + step + 1) // block) for tokens in cached) for step in range(steps)]
    assert {least + i: n for i, n in enumerate(counts.tolist()) if n} == {n: each.count(n) for n in set(each)}


def test_prompts_run_alone_by_default_and_together_up_to_the_prefill_batch() -> None:
    chunks = [Chunk(100, 0, True, 0), Chunk(700, 0, True, 1), Chunk(300, 0, True, 2), Chunk(50, 256, True, 3),
              Chunk(60, 0, True, 4), Chunk(70, 0, True, 5)]  # fmt: skip
    together = [[chunk.request for chunk in group] for group in demands.groups(view(prompt_bs_max=4), chunks)]
    assert together == [[0, 1], [2], [3], [4, 5]]
    alone = list(demands.groups(view(), chunks))
    assert [len(group) for group in alone] == [1] * 6
    assert len(list(demands.groups(view(merged_prefill=True), chunks))) == 1


def test_a_request_is_prompt_chunks_and_then_decodes() -> None:
    built = setup(8192, 4, 2048)
    found = sorted(GAUDI.demands(built, [TrafficRequest(0.0, 3000, 4)], AssumedStepTime()))
    assert found == [
        GraphDemand("decode", (1, 1, 24), 3, 3 * 25),
        GraphDemand("prompt", (1, 952, 16), 1, 968),
        GraphDemand("prompt", (1, 2048, 0), 1, 2048),
    ]


def test_drafts_make_rows_with_all_blocks_of_their_sequence() -> None:
    found = list(GAUDI.demands(setup(num_speculative_tokens=2), [TrafficRequest(0.0, 200, 2)], AssumedStepTime()))
    assert found[-1] == GraphDemand("decode", (3, 1, 6), 1, 9)


@given(st.lists(st.tuples(st.integers(2, 900), st.integers(1, 300)), min_size=1, max_size=25), st.integers(1, 6))
def test_without_contiguous_attention_all_blocks_of_all_steps_are_counted(
    lengths: list[tuple[int, int]], seqs: int
) -> None:
    built = setup(2048, seqs, 512)
    requests = [TrafficRequest(float(i), prompt, output) for i, (prompt, output) in enumerate(lengths)]
    found = list(GAUDI.demands(built, requests, AssumedStepTime()))
    steps = sum(step.steps * len(step.cached) for step in chunked_steps(requests, built.limits, AssumedStepTime()))
    assert steps == sum(output - 1 for _, output in lengths)
    assert steps == sum(demand.steps * demand.shape[0] for demand in found if demand.family == "decode")
    blocks = sum(-(-(prompt + i + 1) // 128) for prompt, output in lengths for i in range(output - 1))
    assert blocks == sum(demand.steps * demand.shape[2] for demand in found if demand.family == "decode")


class Walked:
    """Every step by itself: a queue of ids, a table of places, and the moves of one pass sorted anew each time."""

    def __init__(self, size: int, block: int, threshold: int | None) -> None:
        self.queue = deque(range(1, size))
        self.block, self.threshold = block, threshold
        self.held: dict[int, list[int]] = {}
        self.location = list(range(size))

    def step(self, tokens: list[tuple[int, int]], finished: tuple[int, ...]) -> int:
        for request in finished:
            self.queue.extend(reversed(self.held.pop(request)))
        for request, count in tokens:
            held = self.held.setdefault(request, [])
            while len(held) * self.block < count:
                held.append(self.queue.popleft())
        used = {self.location[block] for held in self.held.values() for block in held}
        if self.threshold is not None and used and max(used) - self.threshold > len(used):
            free = (index for index in range(1, len(self.location)) if index not in used)
            for high, low in zip(sorted(used, reverse=True)[:512], free, strict=False):
                if low > high:
                    break
                first, second = self.location.index(high), self.location.index(low)
                self.location[first], self.location[second] = low, high
            used = {self.location[block] for held in self.held.values() for block in held}
        return max(used, default=0)


@examples(50)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 60)), min_size=1, max_size=30),
    st.integers(1, 5), st.sampled_from([0, 2, 32]), st.booleans(),
)  # fmt: skip
def test_locations_are_those_of_a_walk(lengths: list[tuple[int, int]], seqs: int, threshold: int, defrag: bool) -> None:
    own = {"contiguous_pa": True, "defrag": defrag, "defrag_threshold": threshold, "num_hpu_blocks": 160}
    built = setup(512, seqs, 128, 16, **own)
    requests = [TrafficRequest(i / 50, prompt, output) for i, (prompt, output) in enumerate(lengths)]
    pool = SimulatedBlocks(view(max_model_len=512, max_num_seqs=seqs, tokens=128, block_size=16, **own))
    walked = Walked(160, 16, threshold if defrag else None)
    for run in chunked_steps(requests, built.limits, AssumedStepTime()):
        found: Counter[int] = Counter()
        for batch, highest, steps in pool.take(run):
            assert batch == len(run.cached)
            found[highest] += steps
        expected: Counter[int] = Counter()
        for step in range(run.steps):
            tokens = [(chunk.request, chunk.past + chunk.new) for chunk in run.chunks]
            tokens += [(int(r), int(c) + step + 1) for r, c in zip(run.requests, run.cached, strict=True)]
            highest = walked.step(tokens, run.finished if step == 0 else ())
            if len(run.cached):
                expected[highest + 1] += 1
        assert +found == +expected


def decoded(pool: SimulatedBlocks, requests: list[int], tokens: int, finished: tuple[int, ...] = ()) -> int:
    """The highest place + 1 of the first decode step of `requests`, whose prompts of `tokens` run before it."""
    none = np.zeros(0, np.int64)
    prompts = tuple(Chunk(tokens, 0, True, request) for request in requests)
    assert list(pool.take(MixedSteps(prompts, none, 1, none, finished))) == []
    step = MixedSteps((), np.full(len(requests), tokens), 1, np.array(requests), ())
    ((batch, highest, steps),) = pool.take(step)
    assert (batch, steps) == (len(requests), 1)
    return highest


def test_ids_walk_through_the_cache_and_the_defragmenter_brings_them_down() -> None:
    def highest(defrag: bool) -> int:
        pool = SimulatedBlocks(
            view(max_model_len=8192, max_num_seqs=2, num_hpu_blocks=2000, contiguous_pa=True, defrag=defrag)
        )
        return max(decoded(pool, [turn], 8000, (turn - 1,) if turn else ()) for turn in range(40))

    assert highest(False) > 1900
    assert highest(True) <= 63 + 32 + 1


def test_a_cache_that_is_too_small_grows_since_nothing_is_preempted() -> None:
    pool = SimulatedBlocks(view(max_model_len=2048, max_num_seqs=4, num_hpu_blocks=8, contiguous_pa=True))
    assert decoded(pool, [0, 1], 2000) == 33
