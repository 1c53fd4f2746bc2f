"""Windows in rings: steps write them in place and around their ends, and slots are copied, filled and handed over."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest

from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.compiler.architectures.shared.base import WINDOW
from llmc.compiler.architectures.shared.caches import cache_of
from llmc.compiler.options import CompileOptions
from llmc.compiler.targets import open_target
from llmc.compiler.targets.xla.target import XlaTarget
from llmc.errors import InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import open_sized
from llmc.runtime.step import pad
from llmc.testing.toy import VOCAB, toy_plan
from tests.compiler import tiny
from tests.compiler.compiled import Compiled
from tests.compiler.targets.xla.unoptimised import unoptimised
from tests.tiers import full

pytestmark = full

CASE = "gemma2"
RING, SLOTS, HEADS, WIDTH = 6, 3, 1, 2
KINDS = ("ring", "kv")
LONGEST = 32


class EchoCore:
    """New keys are tokens' ids, in a ring and in a place each; logits mean nothing."""

    weights = ()

    def run(self, given: Any, read: Any, weights: Any) -> Any:
        import jax.numpy as jnp

        from llmc.compiler.targets.xla.step import CoreOutput

        ring, whole = read(0, 0), read(1, 0)
        token_ids = given["token_ids"]
        batch, query = token_ids.shape
        new = jnp.broadcast_to(token_ids[:, None, :, None], (batch, HEADS, query, WIDTH)).astype(jnp.float32)
        return CoreOutput(
            ring[:, 0, :, 0].sum(1, keepdims=True) + whole[:, 0, :, 0].sum(1, keepdims=True), (), (new[None],) * 2
        )


@cache
def step_of(query: int, loops: bool) -> Any:
    import jax

    from llmc.compiler.targets.xla.step import step_function

    return jax.jit(step_function(EchoCore(), "prompt", 16, loops, kinds=KINDS))


def arrays() -> list[Any]:
    return [np.full((1, SLOTS, HEADS, offsets, WIDTH), -1, np.float32) for offsets in (RING, LONGEST)]


def lies(tokens: list[int], offsets: int) -> list[float]:
    """Where a sequence's tokens are, of so many places; −1 where none is."""
    found = [-1.0] * offsets
    for at, token in enumerate(tokens):
        found[at % offsets] = token
    return found


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("query", [1, 4, 6, 16])
def test_the_last_live_tokens_of_rows_of_any_length_are_where_their_numbers_say(query: int, loops: bool) -> None:
    """Beside a cache of all tokens, with a dummy row, past the end of the ring several times."""
    random = np.random.default_rng(query)
    held, texts = arrays(), [list[int]() for _ in range(SLOTS)]
    while min(map(len, (texts[0], texts[2]))) < 14 and max(map(len, texts)) + query <= LONGEST:
        ids = random.integers(0, 99, (3, query)).astype(np.int32)
        new = random.integers(1, query + 1, 3).astype(np.int32)
        slots = np.array([2, -1, 0], np.int32)
        past = np.array([len(texts[2]), 3, len(texts[0])], np.int32)
        _, *held = (np.asarray(out) for out in step_of(query, loops)(ids, past, new, slots, *held))
        for row in (0, 2):
            texts[slots[row]] += ids[row, : new[row]].tolist()
        for slot, text in enumerate(texts):
            for array, offsets in zip(held, (RING, LONGEST), strict=True):
                assert array[0, slot, 0, :, 0].tolist() == lies(text, offsets)
    assert query == 1 or max(map(len, texts)) > 2 * RING


def test_slots_are_filled_behind_a_token_and_copied_with_their_rings() -> None:
    from llmc.compiler.targets.xla.step import slot_programs
    from llmc.runtime.executors.xla.envelope import Tensor

    held = arrays()
    tensors = [Tensor("t", array.shape, "float32", (None,) * 5) for array in held]
    programs = {name: function for name, (function, *_) in slot_programs(tensors, KINDS).items()}
    text = list(range(9))
    for array, offsets in zip(held, (RING, LONGEST), strict=True):
        array[0, 1, 0, :, 0] = lies(text, offsets)

    def ring(built: Any, slot: int) -> list[float]:
        found: list[float] = np.asarray(built[0])[0, slot, 0, :, 0].tolist()
        return found

    filled = programs["slot_fill"](*held, *(np.int32(n) for n in (1, 7, 9)), np.float32(50))
    assert ring(filled, 1) == [6, 50, 50, 3, 4, 5]
    filled = programs["slot_fill"](*held, *(np.int32(n) for n in (1, 0, 0)), np.float32(50))
    assert ring(filled, 1) == [50] * RING
    copied = programs["slot_copy"](*held, *(np.int32(n) for n in (1, 2, 8)))
    assert ring(copied, 2) == ring(held, 1)
    copied = programs["slot_copy"](*held, *(np.int32(n) for n in (1, 2, 4)))
    assert ring(copied, 2) == [6, 7, 8, 3, -1, -1]


PLAN = toy_plan([(1, 16, 192)], [(2, 192)], Limits(192, 2, 192, 8))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Layers with a window, and layers without, verified to the last token; the ring has 128 places."""
    requested = {"device": "xla", "quantize": "none"}
    with unoptimised():
        return Compiled.first(tmp_path_factory.mktemp("rings"), CASE, PLAN, requested, verify="all")


def test_a_bundle_holds_windows_in_rings_and_is_verified_beyond_them(compiled: Compiled) -> None:
    verification = compiled.result.verification
    assert verification["longest"] > 128
    assert verification["max_abs"] < 1e-3
    assert verification["leak"] < 1e-4
    shape = Bundle.open(compiled.path).cache_shape
    assert {(t.window, t.ring) for t in shape} == {(WINDOW, 128), (None, None)}
    taken = {e["memory"]["aliased"] for e in compiled.result.analysis["executables"]}
    assert taken == {sum(math.prod(g[0].size(4, 256)) * len(g) * 4 for g in shape.groups)}


def test_texts_go_on_as_transformers_continues_them_after_a_prefix_was_handed_over(compiled: Compiled) -> None:
    text = [(7 * i) % VOCAB for i in range(180)]
    with unoptimised():
        executor = open_sized(Bundle.open(compiled.path), slots=3, capacity=192, threads=1)
        for slot in range(3):
            executor.nan_fill(slot, 0, float("nan"))
        for start in range(0, 176, 16):
            executor.run(pad(Bucket("prompt", 1, 16, 192), [2], [text[start : start + 16]], [start]))
        executor.copy_prefix(2, 1, 172)
        executor.import_prefix(0, executor.export_prefix(2, 172))
        executor.nan_fill(1, 172, float("nan"))
        logits = executor.run(pad(Bucket("decode", 2, 1, 192), [0, 1], [[text[172]]] * 2, [172, 172]))
        with pytest.raises(InputError, match="its windows after 176 tokens"):
            executor.copy_prefix(2, 1, 176 - 128 + WINDOW - 2)
        executor.close()
    expected = tiny.logits(CASE, text[:173])[-1]
    assert np.abs(logits - expected).max() < 1e-3


@pytest.mark.parametrize(
    ("options", "rings"), [({}, True), ({"roll_layers": True}, False), ({"lowering": "torch-xla"}, False)]
)
def test_layers_that_are_to_be_alike_hold_all_tokens(options: dict[str, object], rings: bool) -> None:
    target = open_target("tpu:v5e-1x1")
    assert isinstance(target, XlaTarget)
    requested = target.configure(CompileOptions.of("tpu:v5e-1x1", **options))
    mixed, alike = (cache_of(tiny.config(case)) for case in (CASE, "mistral"))
    assert bool(target.held_cache(mixed, PLAN.limits, requested).rewind.rings) is rings
    assert bool(target.held_cache(alike, PLAN.limits, requested).rewind.rings) is ("lowering" not in options)
    assert not target.held_cache(alike, Limits(128, 2, 128, 8), requested).rewind.rings
