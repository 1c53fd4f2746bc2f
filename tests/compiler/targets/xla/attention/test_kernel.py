"""The attention kernel, interpreted, and its plain form compute attention, whatever lies beyond the live tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given as forall
from hypothesis import strategies as st

from llmc.compiler.targets.xla.attention import Tiling
from tests.compiler.targets.xla.attention.reference import LAYER, Case, Given, given, reference
from tests.tiers import examples, full

pytestmark = [full, pytest.mark.usefixtures("unoptimised_xla")]


Run = Callable[[Given], np.ndarray]
CASES = {
    "decode, groups of 4, split context": Case(3, 4, 1, 1, 64, 1024),
    "decode, no groups, one split": Case(3, 2, 2, 1, 128, 128),
    "decode, groups of 8, window across blocks": Case(3, 8, 1, 1, 96, 512, window=150),
    "decode, groups of 3, head of 80, capped scores": Case(2, 6, 2, 1, 80, 256, softcap=5.0),
    "chunk, tiles that cut a group": Case(2, 3, 1, 30, 64, 256),
    "chunk, window shorter than the chunk": Case(2, 2, 1, 40, 64, 192, window=7),
    "prompt, several tiles and blocks": Case(2, 2, 1, 70, 128, 0),
    "decode, rows that went around a ring, split": Case(3, 2, 1, 1, 32, 1024, window=270, ring=300),
    "chunk, longer than its window, over a ring": Case(2, 2, 1, 20, 16, 128, window=7, ring=9),
    "decode, values narrower than keys, split context": Case(2, 2, 2, 1, 24, 512, value_dim=12),
    "chunk, values wider than keys, tiles of 16 rows": Case(2, 2, 1, 20, 64, 64, value_dim=512),
}


@cache
def forms(name: str) -> dict[str, Run]:
    import jax

    from llmc.compiler.targets.xla.attention import flash_attention, plain_attention
    from llmc.compiler.targets.xla.cache_view import CacheView

    case = CASES[name]

    def run(attention: Callable[..., Any], **kwargs: Any) -> Run:
        def call(query: Any, key: Any, value: Any, keys: Any, values: Any, slots: Any, past: Any) -> Any:
            views = tuple(CacheView(c, LAYER, slots, "prompt", case.offsets, case.ring > 0) for c in (keys, values))
            cached = views if case.context else None
            return attention(query, key, value, cached, past, case.scale, case.softcap, case.window, **kwargs)

        compiled = jax.jit(call)
        return lambda s: np.asarray(compiled(s.query, s.key, s.value, s.keys, s.values, s.slots, s.past))

    return {"kernel": run(flash_attention, interpret=True), "plain": run(plain_attention)}


@pytest.mark.parametrize("name", CASES)
def test_is_attention_over_live_tokens(name: str) -> None:
    case = CASES[name]
    group = case.heads // case.kv_heads
    tiling = Tiling(case.batch, case.kv_heads, group, case.query, case.head_dim, case.values, case.offsets, 4)
    edges = [n for block in (tiling.block, tiling.block * tiling.splits) for n in (block - 1, block, block + 1)]
    lengths = st.sampled_from([0, 1, *edges, case.context]) | st.integers(0, case.context)
    rows = st.lists(lengths.map(lambda n: min(n, case.context)), min_size=case.batch, max_size=case.batch)
    dummies = st.lists(st.booleans(), min_size=case.batch, max_size=case.batch)

    @examples(12)
    @forall(rows, dummies, st.integers(0, 99))
    def holds(past: list[int], dummy: list[bool], seed: int) -> None:
        step = given(case, past, dummy, seed)
        expected = reference(case, step)
        live = step.slots >= 0
        built = {form: run(step) for form, run in forms(name).items()}
        for form, out in built.items():
            np.testing.assert_allclose(out[live], expected[live], rtol=0, atol=2e-5, err_msg=form)
        assert np.isfinite(built["kernel"]).all(), "a dummy row reads its new tokens alone"

    holds()


def test_a_cache_of_8_bits_is_read_as_what_it_holds() -> None:
    from ml_dtypes import float8_e4m3fn

    name = next(iter(CASES))
    step = given(CASES[name], [0, 100, 1000], [False] * 3, 5)
    keys, values = (tokens.astype(float8_e4m3fn) for tokens in step.by_token)
    held = replace(
        step, keys=step.keys.astype(float8_e4m3fn), values=step.values.astype(float8_e4m3fn), by_token=(keys, values)
    )
    expected = reference(CASES[name], held)
    for form, run in forms(name).items():
        np.testing.assert_allclose(run(held), expected, rtol=0, atol=2e-5, err_msg=form)


@forall(
    st.integers(1, 64), st.integers(1, 8), st.integers(1, 8), st.integers(1, 2048), st.integers(1, 512),
    st.integers(1, 512), st.integers(0, 65536), st.sampled_from([1, 2, 4]),
)  # fmt: skip
def test_tiles_are_what_triton_takes_and_cover_the_step(
    batch: int, kv_heads: int, group: int, query: int, head_dim: int, value_dim: int, context: int, item_bytes: int
) -> None:
    t = Tiling(batch, kv_heads, group, query, head_dim, value_dim, context, item_bytes)
    for size in (t.rows, t.block, t.block_new, t.padded_dim, t.padded_value):
        assert size >= 16 and not size & (size - 1)
    assert t.rows * t.tiles >= group * query > t.rows * (t.tiles - 1)
    assert t.padded_dim >= head_dim and t.padded_value >= value_dim and t.splits >= 1
    assert t.rows * t.padded_value <= 64 * 128 or t.rows == 16
    assert t.splits == 1 or context > 256 * (t.splits - 1)
