"""Steps of a tiny model for three buckets, ragged and with random weights, and what JAX's own lowering computes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from llmc.compiler.architectures.shared.caches import uniform_cache_of
from llmc.compiler.frontend.trace import WeightlessTrace, trace_weightless
from llmc.compiler.program.to_export import serialise, specialise
from llmc.testing.toy import VOCAB
from tests.compiler import tiny

CASE, TOP, SLOTS, CAPACITY = "llama", 4, 4, 32
BUCKETS = {"decode": (3, 1, 16), "prompt": (2, 8, 0), "chunk": (2, 8, 16)}
"""Batch, query and context of a decode step, of a first prompt, and of one that goes on.

Programs with a cache also return the largest logits.
"""


@cache
def traced(cached: bool) -> tuple[WeightlessTrace, bytes]:
    built = trace_weightless(tiny.config(CASE), "two_part", cached=cached, top_k=TOP if cached else 0)
    return built, json.dumps(serialise(built.exported)).encode()


def program(bucket: str) -> bytes:
    return traced(BUCKETS[bucket][2] > 0)[1]


@cache
def special(bucket: str) -> dict[str, Any]:
    return specialise(json.loads(program(bucket)), *BUCKETS[bucket])


@cache
def flat_core(bucket: str) -> Any:
    from llmc.compiler.program.sized import TracedProgram
    from llmc.compiler.targets.xla.step import FlatCore

    return FlatCore(TracedProgram.parse(program(bucket)).at(*BUCKETS[bucket]))


def inputs(bucket: str) -> list[Any]:
    """A step's inputs: ragged rows over a cache of random numbers, and random weights."""
    import jax.numpy as jnp

    batch, query, context = BUCKETS[bucket]
    built, shape = traced(context > 0)[0], uniform_cache_of(tiny.config(CASE), "xla")
    rng = np.random.default_rng(3)
    past = rng.integers(0, context + 1, batch)
    new = rng.integers(1, query + 1, batch)
    rows = [rng.integers(0, VOCAB, (batch, query)), past, new, np.arange(batch)]
    sizes = (shape.layers, SLOTS, shape.kv_heads, CAPACITY, shape.head_dim)
    weights = {name: rng.normal(float("norm" in name), 0.15, size) for name, size in built.parameters.items()}
    weights |= {name: buffer.numpy() for name, buffer in built.buffers.items()}
    taken = [weights[name] for name in flat_core(bucket).weights]
    return [
        *(jnp.asarray(row, jnp.int32) for row in rows),
        *(jnp.asarray(rng.normal(0, 1, sizes), jnp.float32) for _ in range(2)),
        *(jnp.asarray(weight, jnp.float32) for weight in taken),
    ]


def step_of(core: Any, bucket: str) -> Any:
    from llmc.compiler.targets.xla.step import step_function

    return step_function(core, "decode" if bucket == "decode" else "prompt", BUCKETS[bucket][2])


def compiled(core: Any, bucket: str) -> Any:
    import jax

    step = jax.jit(step_of(core, bucket), donate_argnums=(4, 5), keep_unused=True)
    return step.trace(*inputs(bucket)).lower().compile()


def assert_right(built: Sequence[Any], bucket: str) -> None:
    """What a step returned is what JAX's own lowering returns."""
    expected = compiled(flat_core(bucket), bucket)(*inputs(bucket))
    assert len(built) == len(expected) == (3 if bucket == "prompt" else 5)
    for ours, theirs in zip(built, expected, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
