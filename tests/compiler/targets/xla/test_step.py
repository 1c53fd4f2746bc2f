"""A step over a cache on the device: what it reads, what it writes, and that it is updated in place."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.errors import CompileError
from tests.compiler import tiny
from tests.tiers import full

LAYERS, SLOTS, HEADS, CAPACITY, SIZE = 2, 4, 3, 16, 8
Array = NDArray[Any]


class EchoCore:
    """Logits are sums of what was read; new entries are the token ids, with the layer in tenths."""

    weights = ("w",)

    def run(self, given: Any, read: Any, weights: Any) -> Any:
        import jax.numpy as jnp

        from llmc.compiler.targets.xla.step import CoreOutput

        token_ids = given["token_ids"]
        batch, query = token_ids.shape
        rows = [(read(0, layer), read(1, layer)) for layer in range(LAYERS)]
        logits = sum(k.sum((1, 2, 3)) + v.sum((1, 2, 3)) for k, v in rows)
        new = jnp.stack([token_ids + layer / 10 for layer in range(LAYERS)])
        new = jnp.broadcast_to(new[:, :, None, :, None], (LAYERS, batch, HEADS, query, SIZE)).astype(jnp.float32)
        return CoreOutput(jnp.broadcast_to(logits[:, None], (batch, 5)) + 0 * weights[0].sum(), (), (new, -new))


def run(
    phase: str, context: int, token_ids: list[list[int]], past: list[int], new: list[int], slots: list[int],
    cache: tuple[Array, Array] | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    import jax

    from llmc.compiler.targets.xla.step import step_function

    zeros = np.zeros((LAYERS, SLOTS, HEADS, CAPACITY, SIZE), np.float32)
    keys, values = cache or (zeros, zeros)
    rows = [np.array(a, np.int32) for a in (token_ids, past, new, slots)]
    out = jax.jit(step_function(EchoCore(), phase, context))(*rows, keys, values, np.zeros(3, np.float32))
    logits, keys, values = (np.array(o) for o in out)
    return logits, keys, values


def written(keys: Array) -> dict[tuple[int, int], float]:
    """(slot, token) → value of layer 0, for what is not zero; all heads and elements must agree."""
    assert (keys == keys[:, :, :1, :, :1]).all()
    slots, tokens = np.nonzero(keys[0, :, 0, :, 0])
    return {(int(s), int(t)): float(keys[0, s, 0, t, 0]) for s, t in zip(slots, tokens, strict=True)}


def test_live_tokens_of_live_rows_go_to_their_slots_and_nothing_else_is_written() -> None:
    _, keys, values = run("prompt", 0, [[1, 2, 3], [4, 5, 6], [7, 8, 9]], [0, 2, 0], [3, 2, 1], [3, 1, -1])

    assert written(keys) == {(3, 0): 1, (3, 1): 2, (3, 2): 3, (1, 2): 4, (1, 3): 5}
    assert (values == -keys).all()
    assert np.allclose(keys[1, 3, 0, :3, 0], [1.1, 2.1, 3.1])


def test_a_window_that_reaches_past_the_cache_writes_its_live_tokens_where_they_belong() -> None:
    _, keys, _ = run("prompt", 0, [[1, 2, 3, 0, 0, 0]], [CAPACITY - 3], [3], [2])

    assert written(keys) == {(2, CAPACITY - 3): 1, (2, CAPACITY - 2): 2, (2, CAPACITY - 1): 3}


def test_a_full_window_at_the_start_keeps_what_lies_behind() -> None:
    held = np.full((LAYERS, SLOTS, HEADS, CAPACITY, SIZE), np.nan, np.float32)
    _, keys, _ = run("decode", 4, [[7], [8]], [5, 0], [1, 1], [0, -1], (held, held))

    assert keys[0, 0, 0, 5, 0] == 7
    assert np.isnan(np.delete(keys[0, 0, 0, :, 0], 5)).all()
    assert np.isnan(keys[:, 1:]).all()


def test_a_prompt_row_reads_its_slot_and_a_decode_row_the_slot_of_its_number() -> None:
    held = np.zeros((LAYERS, SLOTS, HEADS, CAPACITY, SIZE), np.float32)
    held[:, :, :, :2] = np.arange(SLOTS, dtype=np.float32)[None, :, None, None, None]
    ones = 2 * LAYERS * HEADS * 2 * SIZE

    logits, *_ = run("prompt", 2, [[1], [1]], [2, 2], [1, 1], [3, 2], (held, held))
    assert logits[:, 0].tolist() == [3 * ones, 2 * ones]
    logits, *_ = run("decode", 2, [[1], [1]], [2, 2], [1, 1], [0, 1], (held, held))
    assert logits[:, 0].tolist() == [0, ones]


@cache
def traced(cached: bool) -> bytes:
    import torch

    from llmc.artifacts.key import canonical_json
    from llmc.compiler.frontend.trace import trace_weightless
    from llmc.compiler.program.to_export import serialise

    config = tiny.config("llama")
    return canonical_json(
        serialise(trace_weightless(config, "two_part", cached=cached, dtype=torch.float32, top_k=3).exported)
    )


def lowered(phase: str, batch: int, query: int, context: int) -> Any:
    """The compiled step of the tiny llama on this CPU, its cache donated."""
    import jax
    import jax.numpy as jnp

    from llmc.compiler.program.sized import TracedProgram
    from llmc.compiler.targets.xla.step import FlatCore, step_function

    program = TracedProgram.parse(traced(context > 0))
    bound = program.at(batch, query, context)
    shape = jax.ShapeDtypeStruct
    rows = [shape(s, jnp.int32) for s in ((batch, query), (batch,), (batch,), (batch,))]
    cache_shape = shape((2, 8, 2, 4096, 16), jnp.float32)
    metas = program.graph["tensor_values"]
    weights = [shape(tuple(s["as_int"] for s in metas[name]["sizes"]), jnp.float32) for name in bound.weights]
    function = jax.jit(step_function(FlatCore(bound), phase, context), donate_argnums=(4, 5), keep_unused=True)
    return function.trace(*rows, cache_shape, cache_shape, *weights).lower().compile(), cache_shape


@full
@pytest.mark.parametrize("bucket", [("decode", 3, 1, 64), ("prompt", 2, 8, 64), ("prompt", 2, 8, 0)])
def test_the_cache_is_updated_in_place_and_never_copied(bucket: tuple[str, int, int, int]) -> None:
    compiled, shape = lowered(*bucket)
    memory, size = compiled.memory_analysis(), int(np.prod(shape.shape)) * 4

    assert memory.alias_size_in_bytes == 2 * size
    assert memory.temp_size_in_bytes < size / 4


def test_no_weight_and_no_table_is_folded_into_the_executable() -> None:
    compiled, _ = lowered("decode", 3, 1, 64)
    constants = [line for line in compiled.as_text().splitlines() if " constant({" in line]

    assert all(line.count(",") < 200 for line in constants)


def test_the_program_needs_no_torch_to_be_bound_to_a_bucket() -> None:
    import subprocess
    import sys
    from pathlib import Path
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        file = Path(folder, "program.json")
        file.write_bytes(traced(True))
        code = (
            "import sys; from pathlib import Path; from llmc.compiler.program.sized import TracedProgram\n"
            f"program = TracedProgram.parse(Path({str(file)!r}).read_bytes()).at(3, 1, 64)\n"
            "print(len(program.operations) > 20, program.top, 'torch' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["True", "True", "False"]


def altered(old: str, new: str) -> Any:
    from llmc.compiler.program.sized import TracedProgram

    return TracedProgram.parse(traced(False).replace(old.encode(), new.encode())).at(2, 4, 0)


@full
def test_an_operator_without_a_rule_is_named_with_the_layer_that_it_came_from() -> None:
    from llmc.compiler.targets.xla.operators import evaluate

    program = altered("torch.ops.aten.silu.default", "torch.ops.aten.celu.default")
    import jax.numpy as jnp

    from llmc.compiler.targets.xla.operators import narrowed

    fields = json.loads(traced(False))["graph_module"]["graph"]["tensor_values"]
    sizes = {"token_ids": (2, 4), "past_lengths": (2,), "new_lengths": (2,)}
    values = {
        name: jnp.zeros(
            sizes.get(name) or tuple(s["as_int"] for s in fields[name]["sizes"]), narrowed(program.dtypes[name])
        )
        for name in (*sizes, *program.weights)
    }

    with pytest.raises(CompileError, match=r"aten\.celu\.default \(after model\.layers\.0\.mlp\.gate_proj\.weight\)"):
        evaluate(program, program.operations, values)


def test_a_call_that_is_no_operator_is_refused() -> None:
    with pytest.raises(CompileError, match="not an ATen operator"):
        altered("torch.ops.aten.silu.default", "builtins.eval")


def test_what_is_not_a_traced_program_is_refused() -> None:
    from llmc.compiler.program.sized import TracedProgram

    for data in (b"", b"{}", b"[1]", traced(False).replace(b"past_lengths", b"p")):
        with pytest.raises(ValueError, match=r"program|JSON|Expecting"):
            TracedProgram.parse(data)
