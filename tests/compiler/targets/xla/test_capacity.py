"""What a plan needs of a TPU's memory, whether it fits, and the largest one that does."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.buckets.limits import Limits
from llmc.compiler.targets.xla.capacity import (
    Cache,
    CachePart,
    Need,
    largest_that_fits,
    require_fits,
    values_bytes,
)  # fmt: skip
from llmc.compiler.targets.xla.tpu import device_bytes, parse_topology
from llmc.errors import CompileError
from tests.compiler.targets.xla.refusals import out_of_memory

GIB = 1 << 30
V5E = parse_topology("v5e-2x2")


def keys_and_values(layers: int, kv_heads: int, head_dim: int, item_bytes: int) -> list[CachePart]:
    return [CachePart("kv", (layers, 1, kv_heads, 128, head_dim), item_bytes)] * 2


LLAMA_8B = Cache(tuple(keys_and_values(32, 8, 128, 2)))
"""128 KiB a token."""
STATES = (CachePart("state", (24, 1, 3, 8192), 2), CachePart("state", (24, 1, 32, 128, 128), 4))
"""49 MiB a sequence, of a model whose layers mostly follow the gated delta rule."""
HYBRID = Cache((*keys_and_values(8, 4, 256, 2), *STATES))

sizes = st.integers(1, 300)
grown = st.builds(
    keys_and_values, st.integers(1, 4), st.integers(1, 9), st.sampled_from([64, 80, 128]), st.sampled_from([2, 4])
)
ringed = st.builds(
    CachePart, st.just("ring"), st.tuples(st.integers(1, 4), st.just(1), st.integers(1, 9), st.just(640), st.just(64)),
    st.sampled_from([2, 4]),
)  # fmt: skip
kept = st.builds(
    CachePart, st.just("state"), st.tuples(st.integers(1, 4), st.just(1), st.integers(1, 9), st.integers(1, 99)),
    st.sampled_from([2, 4]),
)  # fmt: skip
both = st.tuples(st.lists(grown, max_size=2), st.lists(ringed | kept, max_size=3))
parts = both.map(lambda both: tuple(part for group in (*both[0], both[1]) for part in group))
caches = st.builds(
    Cache, parts.filter(bool), st.integers(0, 3), st.sampled_from([0, 128]),
    array_bytes=st.sampled_from([values_bytes, device_bytes]),
)  # fmt: skip
limits_of = st.builds(Limits, st.integers(2, 5000), st.integers(1, 70))


def refused(need: Need, cache: Cache, limits: Limits, degrees: dict[int, Need] | None = None) -> str:
    with pytest.raises(CompileError) as error:
        require_fits(need, V5E, cache, limits, degrees)
    return str(error.value)


def test_steps_run_one_at_a_time_and_the_code_of_all_stays() -> None:
    steps = [
        {"arguments": 9, "temporary": 50, "outputs": 30, "aliased": 20, "code": 5},
        {"arguments": 9, "temporary": 10, "outputs": 90, "aliased": 20, "code": 7},
    ]
    assert Need.of(1000, 200, steps) == Need(1000, 200, temporary=80, code=12)
    assert Need.of(1000, 200, steps).total == 1292
    assert Need.of(1000, 200, []) == Need(1000, 200)


def test_flags_for_less_temporary_memory_are_named_where_that_could_be_enough() -> None:
    limits, available = Limits(4096, 8), V5E.usable_bytes
    for weights, named in ((available - 20, True), (available + 1, False)):
        with pytest.raises(CompileError) as error:
            require_fits(Need(weights, 10, temporary=50), V5E, LLAMA_8B, limits, lighter=("--roll-layers",))
        assert ("--roll-layers, with less temporary memory" in str(error.value)) is named


def test_what_fits_passes_up_to_the_last_byte() -> None:
    limits = Limits(4096, 8)
    available = V5E.usable_bytes
    require_fits(Need(available - 10, 10), V5E, LLAMA_8B, limits)
    assert "by 1 byte a chip" in refused(Need(available - 10, 11), LLAMA_8B, limits)


def test_a_refusal_says_by_how_much_where_it_goes_and_what_would_fit() -> None:
    limits = Limits(4096, 24)
    need = Need(8 * GIB, LLAMA_8B.bytes(24, 4096), GIB, GIB // 2)
    degrees = {2: Need(4 * GIB, need.cache // 2, GIB, GIB // 2), 4: Need(2 * GIB, need.cache // 4, GIB, GIB // 2)}
    assert refused(need, LLAMA_8B, limits, degrees) == (
        "does not fit v5e-2x2 by 5.75 GiB a chip: weights 8.00 GiB, cache 12.00 GiB, largest step 1.00 GiB, "
        "code 512.0 MiB; a chip has 15.75 GiB for programs; largest that fits: --max-num-seqs 12 at 4096 tokens, "
        "or --max-model-len 2048 for 24 sequences, or --tensor-parallel 2"
    )


def test_before_anything_is_compiled_weights_and_cache_are_judged_alone() -> None:
    said = refused(Need(8 * GIB, LLAMA_8B.bytes(24, 4096)), LLAMA_8B, Limits(4096, 24))
    assert "weights 8.00 GiB, cache 12.00 GiB; a chip has" in said


def test_slots_that_were_requested_by_number_are_lowered_by_that_flag() -> None:
    built = [CachePart("kv", (32, 30, 8, 4096, 128), 2)] * 2
    cache = Cache.of(built, Limits(4096, 24), fixed_slots=True)
    assert (cache.spare_slots, cache.spare_tokens) == (6, 0)
    assert "--cache-slots 15 at 4096 tokens" in refused(Need(8 * GIB, cache.bytes(24, 4096)), cache, Limits(4096, 24))


def test_states_are_counted_once_a_sequence_whatever_its_length() -> None:
    one = HYBRID.bytes(1, 128)
    assert one - HYBRID.bytes(0, 128) == 128 * 2 * 8 * 4 * 256 * 2 + 24 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)
    assert HYBRID.bytes(1, 256) - one == 128 * 2 * 8 * 4 * 256 * 2
    said = refused(Need(8 * GIB, HYBRID.bytes(200, 4096)), HYBRID, Limits(4096, 200))
    assert "--max-num-seqs 44 at 4096 tokens, or --max-model-len " not in said
    assert "--max-num-seqs 44 at 4096 tokens" in said


def test_a_ring_is_counted_up_to_its_token_slots() -> None:
    cache = Cache.of(
        [CachePart("ring", (26, 3, 4, 640, 64), 2), CachePart("kv", (4, 3, 4, 4096, 64), 2)], Limits(4000, 3)
    )
    assert (cache.spare_slots, cache.spare_tokens) == (0, 0)
    assert cache.bytes(1, 4000) == (26 * 640 + 4 * 4096) * 4 * 64 * 2
    assert cache.bytes(1, 500) == (26 + 4) * 512 * 4 * 64 * 2


def test_a_model_of_states_alone_gains_nothing_from_shorter_sequences() -> None:
    cache = Cache.of([replace(part, shape=(24, 202, *part.shape[2:])) for part in STATES], Limits(4096, 200))
    assert (cache.spare_slots, cache.spare_tokens, cache.grows) == (2, 0, False)
    assert refused(Need(8 * GIB, cache.bytes(200, 4096)), cache, Limits(4096, 200)).endswith(
        "largest that fits: --max-num-seqs 159 at 4096 tokens"
    )


def test_a_device_that_is_half_a_chip_is_called_a_device() -> None:
    with pytest.raises(CompileError, match=re.escape("a device has 94.75 GiB for programs")):
        require_fits(Need(100 * GIB, 0), parse_topology("tpu7x-2x2x1"), LLAMA_8B, Limits(64, 1))


def test_where_nothing_fits_the_way_out_is_more_devices_or_larger_chips() -> None:
    limits = Limits(4096, 24)
    weights = refused(Need(20 * GIB, 12 * GIB), LLAMA_8B, limits)
    assert "the weights alone do not fit: choose more --tensor-parallel, or a topology of larger chips" in weights
    assert "no sequence fits in the remaining memory" in refused(Need(15 * GIB, 12 * GIB, 2 * GIB), LLAMA_8B, limits)
    assert refused(Need(20 * GIB, 0), LLAMA_8B, limits, {4: Need(5 * GIB, 0)}).endswith("fits: --tensor-parallel 4")


@given(caches, limits_of, st.integers(0, 1 << 32), st.integers(0, 1 << 34))
def test_the_largest_that_fits_does_and_the_next_larger_does_not(
    cache: Cache, limits: Limits, fixed: int, available: int
) -> None:
    need = Need(fixed, cache.bytes(limits.max_num_seqs, limits.max_model_len), fixed // 7, fixed // 9)
    beside = need.total - need.cache
    largest = largest_that_fits(need, cache, limits, available)
    seqs, length = largest.max_num_seqs, largest.max_model_len
    assert 0 <= seqs <= limits.max_num_seqs and (length == 0 or 2 <= length <= limits.max_model_len)
    if seqs:
        assert beside + cache.bytes(seqs, limits.max_model_len) <= available
    if seqs < limits.max_num_seqs:
        assert beside + cache.bytes(seqs + 1, limits.max_model_len) > available
    if length and cache.grows:
        assert beside + cache.bytes(limits.max_num_seqs, length) <= available
    if length < limits.max_model_len and cache.grows:
        assert beside + cache.bytes(limits.max_num_seqs, max(length + 1, 2)) > available
    assert (seqs == limits.max_num_seqs) == (need.total <= available)


@given(caches, st.integers(1, 40), st.integers(1, 4000))
def test_a_cache_grows_with_sequences_and_with_their_length(cache: Cache, seqs: int, length: int) -> None:
    assert cache.bytes(seqs, length) <= min(cache.bytes(seqs + 1, length), cache.bytes(seqs, length + 1))


@given(st.lists(sizes, max_size=5), st.sampled_from([2, 4]))
def test_an_array_on_the_device_is_never_smaller_than_its_values(shape: list[int], item_bytes: int) -> None:
    assert device_bytes(shape, item_bytes) >= math.prod(shape) * item_bytes


@given(st.lists(sizes, min_size=2, max_size=4))
def test_padding_depends_on_no_order_of_the_axes(shape: list[int]) -> None:
    assert len({device_bytes(order, 2) for order in permutations(shape)}) == 1


def test_a_cache_of_whole_tiles_has_no_padding_and_a_narrow_one_has() -> None:
    assert LLAMA_8B.bytes(1, 2048) == 2 * 32 * 8 * 2048 * 128 * 2
    assert LLAMA_8B.bytes(1, 2050) == LLAMA_8B.bytes(1, 2176)
    assert device_bytes((30, 3, 130, 64), 2) == 30 * 3 * 256 * 64 * 2


EXCEEDED = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: XLA:TPU compile permanent error. Ran out of memory in memory space "
    "hbm. Used 15.75G of 15.75G hbm. Exceeded hbm capacity by 6.0K.\n\nTotal hbm usage >= 16.00G:\n    reserved 258.00M"
)
TOO_LARGE = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (40.00G) exceeds "
    "available HBM (15.75G)."
)


def test_both_messages_of_xla_say_what_was_used_of_what_there_is() -> None:
    available = round(15.75 * GIB)
    assert out_of_memory(EXCEEDED) == (available + 6144, available)
    assert out_of_memory(TOO_LARGE) == (40 * GIB, available)


@pytest.mark.parametrize("amount", ["512B", "0", "1.5K", "258.00M", "1.25T"])
def test_every_unit_of_xla_is_read(amount: str) -> None:
    factor = {"B": 1, "0": 1, "K": 1 << 10, "M": 1 << 20, "T": 1 << 40}[amount[-1]]
    found = out_of_memory(TOO_LARGE.replace("40.00G", "2000T").replace("15.75G", amount))
    assert found == (2000 << 40, round(float(amount.rstrip("BKMT")) * factor))


def test_what_was_used_is_more_than_there_is_although_xla_rounds() -> None:
    used, available = out_of_memory(TOO_LARGE.replace("40.00G", "15.75G")) or (0, 0)
    assert used == available + 1


@pytest.mark.parametrize(
    "text", ["", "INTERNAL: out of memory", "Used 12.0M of 16.0M vmem. Exceeded vmem capacity by 2.0M.", "of hbm"]
)
def test_any_other_message_is_not_about_memory(text: str) -> None:
    assert out_of_memory(text) is None
