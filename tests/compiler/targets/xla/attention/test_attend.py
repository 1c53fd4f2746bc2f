"""Whole steps in dialect `read_only`: the kernel, interpreted, and the plain form give the model's own tokens."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest

from llmc.compiler.architectures.shared.base import WINDOW
from llmc.compiler.architectures.shared.caches import cache_of
from llmc.compiler.frontend.trace import trace_weightless
from llmc.compiler.program.sized import BoundProgram, TracedProgram
from llmc.compiler.program.to_export import serialise
from llmc.compiler.targets.xla.operators import RULES
from llmc.compiler.targets.xla.scan_layers import fold
from tests.compiler import tiny
from tests.compiler.targets.xla.unoptimised import unoptimised
from tests.tiers import full

CASE = "mistral"
"""Two layers, with a sliding window."""
NAME = "llmc.attend.default"
PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 7], [1, 8, 2, 8, 1, 8, 2]]
TOKENS = 6
PROMPT, DECODE = (3, 8, 0), (3, 1, 16)


@cache
def bound(case: str, sizes: tuple[int, int, int]) -> BoundProgram:
    built = trace_weightless(tiny.config(case), "read_only", cached=sizes[2] > 0)
    return TracedProgram.parse(json.dumps(serialise(built.exported)).encode()).at(*sizes)


def interpreted(**given: Any) -> Any:
    from llmc.compiler.targets.xla.attention import flash_attention

    views = (given.pop("past_key", None), given.pop("past_value", None))
    return flash_attention(past=None if views[0] is None else views, interpret=True, **given)


def greedy(case: str) -> list[list[int]]:
    """Prompts of several lengths in one step, then decode steps, over a cache of NaN."""
    import jax
    import jax.numpy as jnp

    from llmc.compiler.targets.xla.step import FlatCore, step_function

    shape = cache_of(tiny.config(case))
    tensors = dict(tiny.model(case).state_dict())
    tensors |= dict(tiny.model(case).named_buffers())
    cache = [jnp.full((len(group), *group[0].size(4, 32)), jnp.nan, jnp.float32) for group in shape.groups]
    kinds = [group[0].kind for group in shape.groups]
    new = np.array([len(p) for p in PROMPTS])
    ids, past, found = np.zeros((3, 8), np.int32), np.zeros(3, np.int32), []
    for row, prompt in enumerate(PROMPTS):
        ids[row, : len(prompt)] = prompt
    steps = {}
    for name, sizes in (("prompt", PROMPT), ("decode", DECODE)):
        built = FlatCore(bound(case, sizes), shape.offsets)
        weights = [jnp.asarray(tensors[w].numpy()) for w in built.weights]
        steps[name] = jax.jit(step_function(built, name, sizes[2], views=True, kinds=kinds)), weights
    for phase in ["prompt", *["decode"] * (TOKENS - 1)]:
        step, weights = steps[phase]
        rows = (jnp.asarray(a, jnp.int32) for a in (ids, past, new, np.arange(3)))
        logits, *cache = step(*rows, *cache, *weights)
        past, new = past + new, np.ones(3, int)
        ids = np.asarray(logits).argmax(-1)[:, None]
        found.append(ids[:, 0].tolist())
    return np.array(found).T.tolist()


@full
def test_tokens_are_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """With windows, heads of two widths, and layers that read others' keys."""
    expected = [tiny.greedy("gemma4_text", prompt, TOKENS) for prompt in PROMPTS]
    with unoptimised():
        assert greedy("gemma4_text") == expected
        monkeypatch.setitem(RULES, NAME, interpreted)
        assert greedy("gemma4_text") == expected


def test_attention_is_one_operator_a_layer_that_reads_the_cache() -> None:
    program = bound(CASE, DECODE)
    found = [o.arguments for o in program.operations if o.operator == NAME]
    assert [a[name].name for a in found for name in ("past_key", "past_value")] == list(program.cache)
    assert {a["window"] for a in found} == {WINDOW}
    others = {o.operator for o in program.operations if set(o.refs()) & set(program.cache)}
    assert others == {NAME}


@full
def test_layers_are_still_rolled_into_one_body() -> None:
    folded = fold(bound("llama-three-layers", DECODE))
    assert [o.operator for o in folded.body].count(NAME) == 1
    assert len(folded.cache) == 2
