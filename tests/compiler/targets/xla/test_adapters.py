"""Steps whose rows choose an adapter: the same with layers in a row and rolled, whole and divided."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from llmc.compiler.checkpoint.adapter_layout import HIGH, LOW, SELECTABLE, AdapterGroup, AdapterLayout
from llmc.compiler.frontend.trace import WeightlessTrace, trace_weightless
from llmc.compiler.program.sized import TracedProgram
from llmc.compiler.program.to_export import serialise
from llmc.compiler.targets import open_target
from llmc.compiler.targets.xla.sharding import AXIS, weight_shardings
from llmc.errors import InputError
from tests.compiler import tiny
from tests.compiler.targets.xla.test_rolling import stacked
from tests.compiler.targets.xla.unoptimised import unoptimised
from tests.tiers import full

pytestmark = full

ATTENTION, MLP = "model.layers.*.self_attn.", "model.layers.*.mlp."
QKV = tuple(f"{ATTENTION}{name}_proj" for name in "qkv")
LAYOUT = AdapterLayout((AdapterGroup(QKV, (3, 5)), AdapterGroup((f"{MLP}down_proj",), (0, 4))))
CONFIG = {**tiny.config("llama"), "num_hidden_layers": 3, SELECTABLE: LAYOUT.to_json()}
BATCH, QUERY = 4, 5
CHOSEN = [2, 0, 1, 2]


@cache
def traced(dtype: str) -> tuple[WeightlessTrace, TracedProgram]:
    built = trace_weightless(CONFIG, "two_part", cached=False, dtype=getattr(torch, dtype))
    return built, TracedProgram.parse(json.dumps(serialise(built.exported)).encode())


@cache
def step(dtype: str, rolled: bool) -> Callable[[list[int]], np.ndarray]:
    """Logits of one prompt four times, each with its adapter."""
    import jax
    import jax.numpy as jnp

    from llmc.compiler.targets.xla.scan_layers import roll
    from llmc.compiler.targets.xla.step import FlatCore, step_function

    built, program = traced(dtype)
    bound, rng = program.at(BATCH, QUERY, 0), np.random.default_rng(7)
    drawn = {name: rng.normal(float("norm" in name), 0.15, shape) for name, shape in built.parameters.items()}
    arrays: dict[str, Any] = {name: jnp.asarray(a, dtype) for name, a in drawn.items()}
    arrays |= {name: jnp.asarray(buffer.numpy()) for name, buffer in built.buffers.items()}
    core: Any = roll(bound) if rolled else FlatCore(bound)
    arrays = stacked(arrays) if rolled else arrays
    cache = jnp.zeros((3, BATCH, CONFIG["num_key_value_heads"], 8, 16), dtype)
    ids = np.tile(rng.integers(0, CONFIG["vocab_size"], (1, QUERY)), (BATCH, 1))
    numbers = [a.astype(np.int32) for a in (ids, np.zeros(BATCH), np.full(BATCH, QUERY), np.arange(BATCH))]
    given = (cache, cache, *(arrays[name] for name in core.weights))
    with unoptimised():
        function = jax.jit(step_function(core, "prompt", 0, adapted=True))
        compiled = function.lower(*numbers, np.array(CHOSEN, np.int32), *given).compile()
    return lambda chosen: np.asarray(compiled(*numbers, np.array(chosen, np.int32), *given)[0])


@pytest.mark.parametrize("rolled", [False, True])
def test_each_row_has_its_adapter(rolled: bool) -> None:
    logits = step("float32", rolled)
    mixed = logits(CHOSEN)
    np.testing.assert_allclose(mixed, step("float32", False)(CHOSEN), atol=1e-4)
    for row, adapter in enumerate(CHOSEN):
        np.testing.assert_allclose(mixed[row], logits([adapter] * BATCH)[0], atol=1e-5)
    assert np.abs(mixed[0] - mixed[1]).max() > 0.1, "what a row has chosen matters"
    assert np.abs(mixed[2] - mixed[1]).max() > 0.1


def test_in_bfloat16() -> None:
    np.testing.assert_allclose(step("bfloat16", False)(CHOSEN), step("float32", False)(CHOSEN), atol=0.4)


def test_modules_of_one_input_share_a_matrix() -> None:
    built, program = traced("float32")
    assert "model.layers.1.self_attn.q_proj" + LOW in built.parameters
    assert "model.layers.1.self_attn.k_proj" + LOW not in built.parameters
    assert program.takes == ("token_ids", "past_lengths", "new_lengths", "adapters")


def test_factors_are_divided_as_their_modules_are() -> None:
    layer = "model.layers.0."
    shapes = {
        f"{layer}self_attn.q_proj{LOW}": (32, 64), f"{layer}self_attn.q_proj{HIGH}": (64, 32),
        f"{layer}mlp.down_proj{LOW}": (32, 96), f"{layer}mlp.down_proj{HIGH}": (64, 32),
        "adapter_masks.masks_0": (3, 32),
    }  # fmt: skip
    found = {name.removeprefix(layer): s.dims for name, s in weight_shardings(shapes, CONFIG, 2).items()}
    whole = (None, None)
    assert found == {
        f"self_attn.q_proj{LOW}": whole, f"self_attn.q_proj{HIGH}": (AXIS, None),
        f"mlp.down_proj{LOW}": (None, AXIS), f"mlp.down_proj{HIGH}": whole, "adapter_masks.masks_0": whole,
    }  # fmt: skip


def test_another_lowering_has_no_input_for_them() -> None:
    from llmc.compiler.options import CompileOptions

    target: Any = open_target("xla")
    with pytest.raises(InputError, match=r"--lowering jax; leave one of the two out, or merge the adapter"):
        target.cache_shape(CONFIG, CompileOptions.of("xla", lowering="torch-xla"))
