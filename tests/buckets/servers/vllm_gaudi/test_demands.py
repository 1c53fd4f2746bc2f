"""The steps of traffic, in the runner's groups and in blocks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.servers.base import Demand
from llmc.buckets.servers.vllm_gaudi import demands
from llmc.buckets.traffic.chunked_schedule import Chunk, chunked_steps
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.step_time import AssumedStepTime
from tests.buckets.servers.vllm_gaudi.setups import GAUDI, setup, view


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
    made = setup(8192, 4, 2048)
    found = sorted(GAUDI.demands(made, [TrafficRequest(0.0, 3000, 4)], AssumedStepTime()))
    assert found == [
        Demand("decode", (1, 1, 24), 3, 3 * 25),
        Demand("prompt", (1, 952, 16), 1, 968),
        Demand("prompt", (1, 2048, 0), 1, 2048),
    ]


def test_drafts_make_rows_with_all_blocks_of_their_sequence() -> None:
    found = list(GAUDI.demands(setup(num_speculative_tokens=2), [TrafficRequest(0.0, 200, 2)], AssumedStepTime()))
    assert found[-1] == Demand("decode", (3, 1, 6), 1, 9)


@given(st.lists(st.tuples(st.integers(2, 900), st.integers(1, 300)), min_size=1, max_size=25), st.integers(1, 6))
def test_without_contiguous_attention_all_blocks_of_all_steps_are_counted(
    lengths: list[tuple[int, int]], seqs: int
) -> None:
    made = setup(2048, seqs, 512)
    requests = [TrafficRequest(float(i), prompt, output) for i, (prompt, output) in enumerate(lengths)]
    found = list(GAUDI.demands(made, requests, AssumedStepTime()))
    steps = sum(step.steps * len(step.cached) for step in chunked_steps(requests, made.limits, AssumedStepTime()))
    assert steps == sum(output - 1 for _, output in lengths)
    assert steps == sum(demand.steps * demand.shape[0] for demand in found if demand.family == "decode")
    blocks = sum(-(-(prompt + i + 1) // 128) for prompt, output in lengths for i in range(output - 1))
    assert blocks == sum(demand.steps * demand.shape[2] for demand in found if demand.family == "decode")
