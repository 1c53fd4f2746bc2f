"""What the server prepares: its own buckets for any limits, and what is left of a file's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.servers.base import Dropped, Setup
from llmc.buckets.servers.vllm_gaudi import filters
from llmc.buckets.servers.vllm_gaudi.ranges import Ranges
from llmc.buckets.servers.vllm_gaudi.view import View
from llmc.errors import InputError
from tests.buckets.servers.vllm_gaudi import planner
from tests.buckets.servers.vllm_gaudi.setups import GAUDI, setup, setups, view
from tests.tiers import examples


@examples(60)
@given(st.one_of(setups(), setups(6000, bucketing_strategy="lin"), setups(6000, bucketing_strategy="pad")))
def test_its_own_buckets_are_the_planners(made: Setup) -> None:
    seen = View.of(made)
    if seen.strategy != "exp" and seen.block > seen.tokens:
        with pytest.raises(InputError, match="min is above max"):
            GAUDI.default(made)
        return
    lists = GAUDI.default(made)
    assert set(lists["prompt"]) == planner.prompt_buckets(seen)
    assert set(lists["decode"]) == planner.decode_buckets(seen)


def test_drafts_widen_the_servers_own_buckets_even_where_some_are_there_already() -> None:
    made = setup(
        300, 8, 128, block_size=128, bucketing_strategy="lin", contiguous_pa=False, num_speculative_tokens=3,
    )  # fmt: skip
    assert set(GAUDI.default(made)["decode"]) == planner.decode_buckets(View.of(made)) >= {(16, 1, 32), (32, 1, 96)}


def test_a_product_of_prompts_is_bounded_by_the_tokens_of_a_step() -> None:
    made = Ranges([1, 2, 4, 8, 16], [512, 1024], [0, 1, 2, 3, 4])
    assert len(filters.prompts(view(max_model_len=2048, block_size=64), made)) == 25


def test_a_product_of_decodes_is_clipped_to_the_blocks_of_its_sequences() -> None:
    made = Ranges([1, 2, 4, 8, 16, 32, 64], [1], list(range(128, 2049, 128)))
    found = filters.decodes(view(max_model_len=2048, max_num_seqs=64), made)
    assert len(found) == 18 and all(context <= batch * 16 for batch, _, context in found)


def test_a_context_that_is_not_allowed_stays_what_the_query_before_had() -> None:
    made = Ranges([1], [2048, 4096, 8192, 16384], [0, 40])
    limits = {"max_model_len": 16384, "tokens": 16384}
    assert filters.prompts(view(**limits, prompt_ctx_max=100), made) >= {
        (1, 2048, 40), (1, 4096, 96), (1, 8192, 64), (1, 16384, 0),
    }  # fmt: skip


def test_a_file_is_filtered_and_clipped() -> None:
    made = setup(8192, 32, 2048)
    lists = {"prompt": ((1, 128, 64), (1, 128, 65), (2, 2048, 0)), "decode": ((4, 1, 3), (4, 1, 900), (8, 1, 64))}
    accepted = GAUDI.accept(made, lists)
    assert accepted.lists == {"prompt": ((1, 128, 64),), "decode": ((4, 1, 256), (8, 1, 64))}
    assert [drop.shape for drop in accepted.dropped] == [(1, 128, 65), (2, 2048, 0), (4, 1, 3), (4, 1, 900)]
    assert accepted.dropped[3] == Dropped(
        "decode", (4, 1, 900), "clipped to 256 blocks (4 * 64 of max_model_len)"
    )  # fmt: skip
    contiguous = GAUDI.accept(setup(8192, 32, 2048, contiguous_pa=True), lists)
    assert contiguous.lists["decode"] == lists["decode"]


@pytest.mark.parametrize("lists", [{"prompt": ((1, 9000, 0),), "decode": ((1, 1, 8),)},
                                   {"prompt": ((1, 128, 0),), "decode": ((9, 1, 8),)}])  # fmt: skip
def test_a_file_without_a_bucket_left_ends_the_server(lists: dict[str, tuple[tuple[int, ...], ...]]) -> None:
    with pytest.raises(InputError, match="bucket is left"):
        GAUDI.accept(setup(), lists)


def test_a_server_that_slices_long_prompts_leaves_out_what_is_no_slice() -> None:
    made = setup(32768, 8, 20480, sdpa_slices=True)
    lists = {"prompt": ((1, 8192, 0), (1, 8320, 0), (1, 8320, 4)), "decode": ((1, 1, 8),)}
    assert GAUDI.accept(made, lists).lists["prompt"] == ((1, 8192, 0), (1, 8320, 4))


def test_drafts_add_rows() -> None:
    accepted = GAUDI.accept(
        setup(num_speculative_tokens=3), {"prompt": ((1, 128, 0),), "decode": ((2, 1, 8), (2, 1, 4))}
    )
    assert accepted.lists["decode"] == ((2, 1, 4), (2, 1, 8), (8, 1, 8), (8, 1, 16), (8, 1, 32))
    assert [shape for _, shape in accepted.added] == [(8, 1, 8), (8, 1, 16), (8, 1, 32)]


@examples(60)
@given(setups(), st.sets(st.tuples(st.integers(1, 40), st.just(1), st.integers(1, 300)), min_size=1, max_size=12))
def test_seeds_give_what_the_server_prepares(made: Setup, shapes: set[tuple[int, int, int]]) -> None:
    seen = View.of(made)
    prepared = filters.with_drafts(seen, shapes)
    assert filters.with_drafts(seen, filters.seeds(seen, prepared)) == prepared
