"""The values of each dimension, as the plug-in's documents, tests and logs state them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.strategies import exponential as exact
from llmc.errors import InputError
from llmc.integrations.base import Dropped, Setup
from llmc.integrations.vllm_gaudi import sizes
from llmc.integrations.vllm_gaudi.config import GaudiView
from llmc.integrations.vllm_gaudi.sizes import PhaseValues
from tests.integrations.vllm_gaudi import planner
from tests.integrations.vllm_gaudi.setups import GAUDI, setup, setups, view
from tests.tiers import examples


def test_batches_of_a_real_server() -> None:
    assert sizes.exponential(1, 2, 256, 9, False) == [1, 2, 4, 8, 14, 24, 42, 78, 140, 256]


@pytest.mark.parametrize("top", [False, True])
def test_powers_are_floats_as_in_the_plug_in(top: bool) -> None:
    assert sizes.exponential(1, 2, 64, 6, top) == [1, 2, 4, 8, 18, 34, 64]
    assert exact.values(1, 2, 64, 6) == [1, 2, 4, 8, 16, 32, 64]


def test_contiguous_attention_ends_at_the_top_itself() -> None:
    assert sizes.exponential(1, 256, 3593, 13, True)[-1] == 3593
    assert sizes.exponential(1, 8, 5, 4, True) == [1, 5]


def test_a_range_without_values_ends_the_server() -> None:
    with pytest.raises(InputError, match="has no value"):
        sizes.exponential(128, 128, 1, 0, False)


def test_ranges_of_a_real_server() -> None:
    """Qwen3-32B, max_model_len 91964, 256 sequences, 2048 tokens, 3593 blocks: #1091 to #1700."""
    real = view(max_model_len=91964, max_num_seqs=256, tokens=2048, num_hpu_blocks=3593)
    prompt, decode = sizes.prompt_ranges(real), sizes.decode_ranges(real)
    assert prompt.batches == [1]
    assert prompt.queries == sizes.exponential(128, 128, 2048, 11, False)
    assert prompt.contexts == sizes.exponential(0, 1, 702, 11, False)
    assert decode.contexts == sizes.exponential(1, 256, 3 * 3593, 15, False)
    unbounded = view(
        max_model_len=91964, max_num_seqs=256, tokens=2048, num_hpu_blocks=3593, unbounded_decode_blocks=True
    )
    assert sizes.decode_ranges(unbounded).contexts == sizes.exponential(1, 256, 719 * 256, 19 + 6, False)
    contiguous = view(max_model_len=91964, max_num_seqs=256, tokens=2048, num_hpu_blocks=3593, contiguous_pa=True)
    assert sizes.decode_ranges(contiguous).contexts[-1] == 3593


def test_the_caches_blocks_join_a_contiguous_range() -> None:
    small = view(max_model_len=1024, max_num_seqs=4, num_hpu_blocks=100, contiguous_pa=True)
    assert sizes.decode_ranges(small).contexts[-2:] == [32, 100]


def test_padding_aware_defaults() -> None:
    built = sizes.prompt_ranges(view(max_model_len=4096, tokens=2048, prompt_bs_max=16, bucketing_strategy="pad"))
    assert built.batches == [1, 2, 4, 6, 8, 12, 16]
    assert built.queries[:3] == [128, 256, 384] and built.queries[-1] == 2048
    assert built.contexts[0] == 0 and built.contexts[-1] == 31


def test_variables_of_the_linear_strategy() -> None:
    own = {"bucketing_strategy": "lin", "prompt_seq_step": 512, "prompt_query_max": 1024, "prompt_ctx_max": 2}
    built = sizes.prompt_ranges(view(max_model_len=4096, **own))
    assert built.queries == [128, 256, 512, 1024]
    assert built.contexts == [0, 1, 2]
    decode = sizes.decode_ranges(view(max_model_len=4096, max_num_seqs=64, bucketing_strategy="lin", decode_bs_max=40))
    assert decode.batches == [1, 2, 4, 8, 16, 32]
    assert decode.contexts[-1] == 4096 * 64 // 128


def test_the_old_switch_wins_over_the_strategy() -> None:
    assert view(bucketing_strategy="pad", exponential_bucketing=True).strategy == "exp"
    assert view(bucketing_strategy="pad", exponential_bucketing=False).strategy == "lin"


def test_a_decode_range_above_the_cache_is_moved_below_it() -> None:
    own = {"decode_block_min": 4096, "decode_block_max": 8192, "num_hpu_blocks": 3593, "contiguous_pa": True}
    built = sizes.decode_ranges(view(max_model_len=4096, max_num_seqs=64, bucketing_strategy="pad", **own))
    assert built.contexts == [3465, 3593]


@pytest.mark.parametrize("strategy", ["lin", "pad"])
def test_ranges_beyond_all_servers_are_refused(strategy: str) -> None:
    built = {"bucketing_strategy": strategy, "contiguous_pa": True}
    with pytest.raises(InputError, match="spans more than 65536 values; raise step"):
        sizes.decode_ranges(view(**built, num_hpu_blocks=10**12))
    with pytest.raises(InputError, match=r"its ranges give \d+ buckets, more than 1048576"):
        GAUDI.default(setup(**built, decode_bs_step=1, decode_block_step=1, decode_bs_pad_percent=0,
                            decode_block_pad_percent=0, num_hpu_blocks=60_000))  # fmt: skip


def test_merged_prefill_counts_all_prompts_of_a_step() -> None:
    built = sizes.prompt_ranges(
        view(max_model_len=4096, max_num_seqs=16, bucketing_strategy="pad", merged_prefill=True)
    )
    assert built.batches == [1] and built.queries[0] == 128 and built.contexts[-1] == 31 * 16


@examples(60)
@given(st.one_of(setups(), setups(6000, bucketing_strategy="lin"), setups(6000, bucketing_strategy="pad")))
def test_its_own_buckets_are_the_planners(built: Setup) -> None:
    seen = GaudiView.of(built)
    if seen.strategy != "exp" and seen.block > seen.tokens:
        with pytest.raises(InputError, match="min is above max"):
            GAUDI.default(built)
        return
    lists = GAUDI.default(built)
    assert set(lists["prompt"]) == planner.prompt_buckets(seen)
    assert set(lists["decode"]) == planner.decode_buckets(seen)


def test_drafts_widen_the_servers_own_buckets_even_where_some_are_there_already() -> None:
    built = setup(
        300, 8, 128, block_size=128, bucketing_strategy="lin", contiguous_pa=False, num_speculative_tokens=3,
    )  # fmt: skip
    assert (
        set(GAUDI.default(built)["decode"]) == planner.decode_buckets(GaudiView.of(built)) >= {(16, 1, 32), (32, 1, 96)}
    )


def test_a_product_of_prompts_is_bounded_by_the_tokens_of_a_step() -> None:
    built = PhaseValues([1, 2, 4, 8, 16], [512, 1024], [0, 1, 2, 3, 4])
    assert len(sizes.prompt_buckets(view(max_model_len=2048, block_size=64), built)) == 25


def test_a_product_of_decodes_is_clipped_to_the_blocks_of_its_sequences() -> None:
    built = PhaseValues([1, 2, 4, 8, 16, 32, 64], [1], list(range(128, 2049, 128)))
    found = sizes.decode_buckets(view(max_model_len=2048, max_num_seqs=64), built)
    assert len(found) == 18 and all(context <= batch * 16 for batch, _, context in found)


def test_a_context_that_is_not_allowed_stays_what_the_query_before_had() -> None:
    built = PhaseValues([1], [2048, 4096, 8192, 16384], [0, 40])
    limits = {"max_model_len": 16384, "tokens": 16384}
    assert sizes.prompt_buckets(view(**limits, prompt_ctx_max=100), built) >= {
        (1, 2048, 40), (1, 4096, 96), (1, 8192, 64), (1, 16384, 0),
    }  # fmt: skip


def test_a_file_is_filtered_and_clipped() -> None:
    built = setup(8192, 32, 2048)
    lists = {"prompt": ((1, 128, 64), (1, 128, 65), (2, 2048, 0)), "decode": ((4, 1, 3), (4, 1, 900), (8, 1, 64))}
    accepted = GAUDI.accept(built, lists)
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
    with pytest.raises(InputError, match=r"filters leave no (prompt|decode) bucket"):
        GAUDI.accept(setup(), lists)


def test_a_server_that_slices_long_prompts_leaves_out_what_is_no_slice() -> None:
    built = setup(32768, 8, 20480, sdpa_slices=True)
    lists = {"prompt": ((1, 8192, 0), (1, 8320, 0), (1, 8320, 4)), "decode": ((1, 1, 8),)}
    assert GAUDI.accept(built, lists).lists["prompt"] == ((1, 8192, 0), (1, 8320, 4))


def test_drafts_add_rows() -> None:
    accepted = GAUDI.accept(
        setup(num_speculative_tokens=3), {"prompt": ((1, 128, 0),), "decode": ((2, 1, 8), (2, 1, 4))}
    )
    assert accepted.lists["decode"] == ((2, 1, 4), (2, 1, 8), (8, 1, 8), (8, 1, 16), (8, 1, 32))
    assert [shape for _, shape in accepted.added] == [(8, 1, 8), (8, 1, 16), (8, 1, 32)]


@examples(60)
@given(setups(), st.sets(st.tuples(st.integers(1, 40), st.just(1), st.integers(1, 300)), min_size=1, max_size=12))
def test_seeds_give_what_the_server_prepares(built: Setup, shapes: set[tuple[int, int, int]]) -> None:
    seen = GaudiView.of(built)
    prepared = sizes.with_drafts(seen, shapes)
    assert sizes.with_drafts(seen, sizes.seeds(seen, prepared)) == prepared
