"""The values of each dimension, as the plug-in's documents, tests and logs state them."""

from __future__ import annotations

import pytest

from llmc.buckets.servers.vllm_gaudi import ranges
from llmc.buckets.strategies import exponential as exact
from llmc.errors import InputError
from tests.buckets.servers.vllm_gaudi.setups import GAUDI, setup, view


def test_batches_of_a_real_server() -> None:
    assert ranges.exponential(1, 2, 256, 9, False) == [1, 2, 4, 8, 14, 24, 42, 78, 140, 256]


@pytest.mark.parametrize("top", [False, True])
def test_powers_are_floats_as_in_the_plug_in(top: bool) -> None:
    assert ranges.exponential(1, 2, 64, 6, top) == [1, 2, 4, 8, 18, 34, 64]
    assert exact.values(1, 2, 64, 6) == [1, 2, 4, 8, 16, 32, 64]


def test_contiguous_attention_ends_at_the_top_itself() -> None:
    assert ranges.exponential(1, 256, 3593, 13, True)[-1] == 3593
    assert ranges.exponential(1, 8, 5, 4, True) == [1, 5]


def test_a_range_without_values_ends_the_server() -> None:
    with pytest.raises(InputError, match="has no value"):
        ranges.exponential(128, 128, 1, 0, False)


def test_ranges_of_a_real_server() -> None:
    """Qwen3-32B, max_model_len 91964, 256 sequences, 2048 tokens, 3593 blocks: #1091 to #1700."""
    real = view(max_model_len=91964, max_num_seqs=256, tokens=2048, num_hpu_blocks=3593)
    prompt, decode = ranges.prompt(real), ranges.decode(real)
    assert prompt.batches == [1]
    assert prompt.queries == ranges.exponential(128, 128, 2048, 11, False)
    assert prompt.contexts == ranges.exponential(0, 1, 702, 11, False)
    assert decode.contexts == ranges.exponential(1, 256, 3 * 3593, 15, False)
    unbounded = view(
        max_model_len=91964, max_num_seqs=256, tokens=2048, num_hpu_blocks=3593, unbounded_decode_blocks=True
    )
    assert ranges.decode(unbounded).contexts == ranges.exponential(1, 256, 719 * 256, 19 + 6, False)
    contiguous = view(max_model_len=91964, max_num_seqs=256, tokens=2048, num_hpu_blocks=3593, contiguous_pa=True)
    assert ranges.decode(contiguous).contexts[-1] == 3593


def test_the_caches_blocks_join_a_contiguous_range() -> None:
    small = view(max_model_len=1024, max_num_seqs=4, num_hpu_blocks=100, contiguous_pa=True)
    assert ranges.decode(small).contexts[-2:] == [32, 100]


def test_padding_aware_defaults() -> None:
    made = ranges.prompt(view(max_model_len=4096, tokens=2048, prompt_bs_max=16, bucketing_strategy="pad"))
    assert made.batches == [1, 2, 4, 6, 8, 12, 16]
    assert made.queries[:3] == [128, 256, 384] and made.queries[-1] == 2048
    assert made.contexts[0] == 0 and made.contexts[-1] == 31


def test_variables_of_the_linear_strategy() -> None:
    own = {"bucketing_strategy": "lin", "prompt_seq_step": 512, "prompt_query_max": 1024, "prompt_ctx_max": 2}
    made = ranges.prompt(view(max_model_len=4096, **own))
    assert made.queries == [128, 256, 512, 1024]
    assert made.contexts == [0, 1, 2]
    decode = ranges.decode(view(max_model_len=4096, max_num_seqs=64, bucketing_strategy="lin", decode_bs_max=40))
    assert decode.batches == [1, 2, 4, 8, 16, 32]
    assert decode.contexts[-1] == 4096 * 64 // 128


def test_the_old_switch_wins_over_the_strategy() -> None:
    assert view(bucketing_strategy="pad", exponential_bucketing=True).strategy == "exp"
    assert view(bucketing_strategy="pad", exponential_bucketing=False).strategy == "lin"


def test_a_decode_range_above_the_cache_is_moved_below_it() -> None:
    own = {"decode_block_min": 4096, "decode_block_max": 8192, "num_hpu_blocks": 3593, "contiguous_pa": True}
    made = ranges.decode(view(max_model_len=4096, max_num_seqs=64, bucketing_strategy="pad", **own))
    assert made.contexts == [3465, 3593]


@pytest.mark.parametrize("strategy", ["lin", "pad"])
def test_ranges_beyond_all_servers_are_refused(strategy: str) -> None:
    made = {"bucketing_strategy": strategy, "contiguous_pa": True}
    with pytest.raises(InputError, match="spans more than 65536 values; raise step"):
        ranges.decode(view(**made, num_hpu_blocks=10**12))
    with pytest.raises(InputError, match=r"its ranges make \d+ buckets, more than 1048576"):
        GAUDI.default(setup(**made, decode_bs_step=1, decode_block_step=1, decode_bs_pad_percent=0,
                            decode_block_pad_percent=0, num_hpu_blocks=60_000))  # fmt: skip


def test_merged_prefill_counts_all_prompts_of_a_step() -> None:
    made = ranges.prompt(view(max_model_len=4096, max_num_seqs=16, bucketing_strategy="pad", merged_prefill=True))
    assert made.batches == [1] and made.queries[0] == 128 and made.contexts[-1] == 31 * 16
