"""Rolled layers: one body run once a layer computes what the layers in a row compute, or is refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from llmc.compiler.architectures.shared.base import WINDOW
from llmc.compiler.architectures.shared.caches import uniform_cache_of
from llmc.compiler.frontend.trace import WeightlessTrace, trace_weightless
from llmc.compiler.program.sized import BoundProgram, Operation, Ref, TracedProgram
from llmc.compiler.program.to_export import serialise
from llmc.compiler.targets.xla.scan_layers import NotRollableError, stacked_names
from llmc.testing.toy import VOCAB
from tests.compiler import tiny
from tests.compiler.targets.xla.unoptimised import unoptimised
from tests.tiers import full

pytestmark = full

LAYERS = 3
MIXED = "qwen2-mixed-windows"
CASES = ["llama", "qwen3", MIXED]
BUCKETS = {"prompt": (3, 6, 0), "chunk": (3, 4, 8), "decode": (3, 1, 8)}
"""Batch, query and context of a first prompt, of one that goes on, and of a decode step."""
TOP = 4
F32 = "float32"


def config(case: str, layers: int = LAYERS) -> dict[str, Any]:
    windows = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    known = {**tiny.config("qwen2"), **windows} if case == MIXED else tiny.config(case)
    return {**known, "num_hidden_layers": layers}


@cache
def traced(case: str, cached: bool, dtype: str, layers: int) -> tuple[WeightlessTrace, TracedProgram]:
    """Programs with a cache also return the largest logits."""
    built = trace_weightless(
        config(case, layers), "two_part", cached=cached, dtype=getattr(torch, dtype), top_k=TOP if cached else 0
    )
    return built, TracedProgram.parse(json.dumps(serialise(built.exported)).encode())


def program(case: str, bucket: str, dtype: str = F32, layers: int = LAYERS) -> BoundProgram:
    sizes = BUCKETS[bucket]
    return traced(case, sizes[2] > 0, dtype, layers)[1].at(*sizes)


@cache
def weights(case: str, dtype: str) -> dict[str, Any]:
    """Random parameters, and the buffers as they are, by the checkpoint's names."""
    import jax.numpy as jnp

    built, _ = traced(case, True, dtype, LAYERS)
    rng = np.random.default_rng(7)
    drawn = {name: rng.normal(float("norm" in name), 0.15, shape) for name, shape in built.parameters.items()}
    found = {name: jnp.asarray(a, dtype) for name, a in drawn.items()}
    return found | {name: jnp.asarray(buffer.numpy()) for name, buffer in built.buffers.items()}


def stacked(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """What `stacked_names` says of the arrays, done."""
    import jax.numpy as jnp

    names = stacked_names({name: a.shape for name, a in arrays.items()})
    return {n: jnp.asarray(np.stack([arrays[s] for s in of])) if "*" in n else arrays[of[0]] for n, of in names.items()}


def run(core: Any, arrays: Mapping[str, Any], case: str, bucket: str, dtype: str) -> dict[str, np.ndarray]:
    """What a core returns for ragged rows over a cache whose unused part is NaN."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    batch, query, context = BUCKETS[bucket]
    shape = uniform_cache_of(config(case), "xla")
    rng = np.random.default_rng(3)
    past = np.minimum(np.array([8, 5, 0]), context)
    held = rng.normal(0, 1, (2, LAYERS, batch, shape.kv_heads, context, shape.head_dim))
    for row, length in enumerate(past):
        held[:, :, row, :, length:] = np.nan

    def step(ids: Any, past: Any, new: Any, held: Any, *arguments: Any) -> Any:
        def read(group: int, layer: Any) -> Any:
            return lax.dynamic_index_in_dim(held[group], layer, keepdims=False)

        return core.run({"token_ids": ids, "past_lengths": past, "new_lengths": new}, read, arguments)

    ids = rng.integers(0, VOCAB, (batch, query))
    new = np.array([query, max(query - 2, 1), 1])
    counts = [jnp.asarray(a, "int32") for a in (ids, past, new)]
    with unoptimised():
        out = jax.jit(step)(*counts, jnp.asarray(held, dtype), *(arrays[name] for name in core.weights))
    named = {"logits": out.logits, **dict(zip(("keys", "values"), out.entries, strict=True))}
    named |= dict(zip(("largest", "ids"), out.top, strict=bool(out.top)))
    return {name: np.asarray(a, np.float32) for name, a in named.items()}


def both(case: str, bucket: str, dtype: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    from llmc.compiler.targets.xla.scan_layers import roll
    from llmc.compiler.targets.xla.step import FlatCore

    bound, arrays = program(case, bucket, dtype), weights(case, dtype)
    flat = run(FlatCore(bound), arrays, case, bucket, dtype)
    return flat, run(roll(bound), stacked(arrays), case, bucket, dtype)


@pytest.mark.parametrize(("case", "bucket"), list(zip(CASES, BUCKETS, strict=True)))
def test_rolled_layers_compute_what_layers_in_a_row_compute(case: str, bucket: str) -> None:
    flat, rolled = both(case, bucket, F32)
    assert list(rolled) == list(flat)
    for name, expected in flat.items():
        assert np.isfinite(expected).all()
        np.testing.assert_allclose(rolled[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)
    assert flat["keys"].shape[0] == LAYERS
    assert len({flat["keys"][layer].tobytes() for layer in range(LAYERS)}) == LAYERS


def test_layers_of_different_windows_share_a_body_that_takes_its_layers_mask() -> None:
    from llmc.compiler.targets.xla.scan_layers import fold

    varying = fold(program(MIXED, "decode")).varying
    assert len(varying) == 2, "the mask, and which places hold a token of the past"
    for name, choices in varying.items():
        assert choices[0] != choices[1] == choices[2] == name
    assert not fold(program("mistral", "decode")).varying


def test_what_the_compiler_sees_does_not_grow_with_the_layers() -> None:
    from llmc.compiler.targets.xla.scan_layers import fold

    three, four = (fold(program("llama", "decode", layers=n)) for n in (3, 4))
    for part in ("prelude", "body", "epilogue"):
        assert [o.operator for o in getattr(three, part)] == [o.operator for o in getattr(four, part)]
    assert (three.layers, four.layers) == (3, 4)
    assert len(three.carries) == 2


def test_every_bucket_takes_the_same_weights_in_the_same_order() -> None:
    from llmc.compiler.targets.xla.scan_layers import roll

    shapes = {name: a.shape for name, a in weights(tiny.TIED, F32).items()}
    backwards = dict(reversed(shapes.items()))
    taken = [roll(program(tiny.TIED, bucket)).weights for bucket in BUCKETS]
    assert taken == [list(stacked_names(shapes))] * len(BUCKETS) == [list(stacked_names(backwards))] * len(BUCKETS)


def test_weights_of_layers_are_stacked_in_the_order_of_layers() -> None:
    shapes = {f"model.layers.{i}.mlp.experts.3.weight": (2, 4) for i in (10, *range(10))} | {"lm_head.weight": (7, 2)}
    assert stacked_names(shapes) == {
        "lm_head.weight": ("lm_head.weight",),
        "model.layers.*.mlp.experts.3.weight": tuple(f"model.layers.{i}.mlp.experts.3.weight" for i in range(11)),
    }


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({"m.0.up": (2, 4), "m.1.up": (2, 5)}, r"m\.1\.up is \[2, 5\], where m\.0\.up is \[2, 4\]"),
        ({"m.0.up": (2,), "m.1.up": (2,), "m.1.gate": (2,)}, r"layer 0 has no m\.\*\.gate, which layer 1 has"),
        ({"a.0.up": (2,), "b.0.up": (2,)}, r"several stacks of layers: a\.\*, b\.\*"),
    ],
    ids=["shapes", "missing", "two-stacks"],
)
def test_weights_that_differ_between_layers_are_refused(shapes: dict[str, tuple[int, ...]], reason: str) -> None:
    with pytest.raises(NotRollableError, match=reason):
        stacked_names(shapes)


Change = Callable[[BoundProgram], BoundProgram]


def changed(operator: str, index: int, change: Callable[[Operation, BoundProgram], Operation]) -> Change:
    """The program with another operation in the place of one `operator`, the layer's where each layer has one."""

    def apply(program: BoundProgram) -> BoundProgram:
        operations = list(program.operations)
        position = [i for i, o in enumerate(operations) if o.operator == operator][index]
        operations[position] = change(operations[position], program)
        return replace(program, operations=tuple(operations))

    return apply


def tanh(operation: Operation, _: BoundProgram) -> Operation:
    return replace(operation, operator="tanh.default")


def of_an_earlier_layer(operation: Operation, program: BoundProgram) -> Operation:
    """The last projection of a layer, of what the first layer projects too."""
    first = next(o for o in program.operations if o.operator == "silu.default")
    return replace(operation, arguments={**operation.arguments, "input": Ref(first.outputs[0])})


def of_the_body(operation: Operation, program: BoundProgram) -> Operation:
    last = [o for o in program.operations if o.operator == "silu.default"][-1]
    return replace(operation, arguments={**operation.arguments, "self": Ref(last.outputs[0])})


def with_entries_swapped(program: BoundProgram) -> BoundProgram:
    *others, key, value = program.outputs
    return replace(program, outputs=(*others, value, key))


def with_another_dtype(program: BoundProgram) -> BoundProgram:
    name = next(n for n, c in program.weights.items() if c == "model.layers.1.mlp.up_proj.weight")
    return replace(program, dtypes={**program.dtypes, name: 13})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed("silu.default", 0, tanh), r"of layer 0 \(tanh\.default → silu\) is not that of layer 1 \(silu"),
        (changed("silu.default", 2, tanh), r"tanh\.default → silu_2 of the last layer has no counterpart in layer 1"),
        (changed("linear.default", 20, of_an_earlier_layer), r"layer 2 reads silu of layer 0"),
        (
            changed("index.Tensor", 0, of_the_body),
            r"index\.Tensor → index .* reads silu_2, which layers do not hand on",
        ),
        (with_another_dtype, r"operation \d+ of layer 0 \(linear\.default"),
        (with_entries_swapped, r"layer 2 computes its new keys differently from layer 1"),
    ],
    ids=["first-layer", "last-layer", "two-layers-back", "epilogue", "dtype", "new-entries"],
)
def test_layers_that_differ_are_refused_with_the_difference(change: Change, reason: str) -> None:
    from llmc.compiler.targets.xla.scan_layers import roll

    with pytest.raises(NotRollableError, match=reason):
        roll(change(program("llama", "decode")))


def test_a_difference_in_the_middle_is_named_with_its_layer() -> None:
    from llmc.compiler.targets.xla.scan_layers import roll

    with pytest.raises(NotRollableError, match=r"of layer 2 \(tanh\.default → silu_2\) is not that of layer 1"):
        roll(changed("silu.default", 2, tanh)(program("llama", "decode", layers=4)))


def test_fewer_than_three_layers_are_refused() -> None:
    from llmc.compiler.targets.xla.scan_layers import roll

    with pytest.raises(NotRollableError, match="it has 2 layers, and rolling pays for 3 or more"):
        roll(program("llama", "prompt", layers=2))


@pytest.mark.parametrize("bucket", ["decode", "chunk"])
def test_the_cache_is_updated_in_place_and_never_copied(bucket: str) -> None:
    import jax

    from llmc.compiler.targets.xla.scan_layers import roll
    from llmc.compiler.targets.xla.step import step_function

    (batch, query, context), shape = BUCKETS[bucket], uniform_cache_of(config("llama"), "xla")
    core, arrays = roll(program("llama", bucket)), stacked(weights("llama", F32))
    cache = jax.ShapeDtypeStruct((LAYERS, batch, shape.kv_heads, 8192, shape.head_dim), "float32")
    row = jax.ShapeDtypeStruct((batch,), "int32")
    ids = jax.ShapeDtypeStruct((batch, query), "int32")
    step = jax.jit(
        step_function(core, "decode" if query == 1 else "prompt", context), donate_argnums=(4, 5), keep_unused=True
    )
    compiled = step.lower(ids, row, row, row, cache, cache, *(arrays[n] for n in core.weights)).compile()
    size = cache.size * 4
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * size
    assert memory.temp_size_in_bytes < size / 4
