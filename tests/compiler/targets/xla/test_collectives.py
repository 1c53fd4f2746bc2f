"""Collectives are counted from a compiled program's text."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from llmc.compiler.targets.xla.build import collectives
from tests.tiers import full


def module(*instructions: str, before: str = "") -> str:
    body = "\n".join(f"  {line}" for line in instructions)
    return f"HloModule jit_f, is_scheduled=true\n\n{before}ENTRY %main.1 (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def row(count: int, size: int, in_loop: int = 0) -> dict[str, int]:
    return {"count": count, "bytes": size, "in_loop": in_loop}


def test_each_kind_counts_with_the_bytes_of_its_results() -> None:
    found = collectives(module(
        '%ar = f32[3,1,64]{2,1,0} all-reduce(%x), channel_id=1, to_apply=%add.clone, metadata={op_name="jit(f)/dot"}',
        "%ar.1 = bf16[8,8192]{1,0:T(8,128)(2,1)S(1)} all-reduce(%fusion.85), channel_id=3, to_apply=%add",
        "ROOT %ag = bf16[2,64,8]{1,2,0:T(8,128)(2,1)} all-gather(%b), dimensions={0}, use_global_device_ids=true",
        "%rs = f32[16]{0} reduce-scatter(%ag), dimensions={0}, to_apply=%add",
        "%cp = s32[4]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}",
    ))  # fmt: skip
    assert found == {
        "all-reduce": row(2, 3 * 64 * 4 + 8 * 8192 * 2), "all-gather": row(1, 2 * 64 * 8 * 2),
        "reduce-scatter": row(1, 64), "collective-permute": row(1, 16),
    }  # fmt: skip


def test_results_in_a_tuple_are_summed() -> None:
    found = collectives(module(
        "%a = (f32[8]{0}, /*index=1*/bf16[4,2]{1,0}) all-reduce(%x, %y), to_apply=%add",
        "%b = (s8[16]{0}, s8[16]{0}) all-to-all(%x, %y), replica_groups={{0,1}}",
    ))  # fmt: skip
    assert found == {"all-reduce": row(1, 32 + 16), "all-to-all": row(1, 32)}


def test_an_asynchronous_exchange_counts_once_with_its_result_alone() -> None:
    found = collectives(module(
        "%s = f32[8]{0} all-reduce-start(%x), to_apply=%add",
        "%d = f32[8]{0} all-reduce-done(%s)",
        "%g = (f32[8]{0}, f32[32]{0}) all-gather-start(%x), dimensions={0}",
        "%h = f32[32]{0} all-gather-done(%g)",
        "%p = (f32[8]{0}, f32[8]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x)",
        "%q = f32[8]{0} collective-permute-done(%p)",
        "%t = ((f32[8]{0}, f32[8]{0}), (f32[2]{0}, f32[2]{0})) reduce-scatter-start(%x, %y), to_apply=%add",
        "%u = (f32[2]{0}, f32[2]{0}) reduce-scatter-done(%t)",
    ))  # fmt: skip
    assert found == {
        "all-reduce": row(1, 32), "all-gather": row(1, 128), "reduce-scatter": row(1, 16),
        "collective-permute": row(1, 32),
    }  # fmt: skip


def test_what_stands_in_a_loop_counts_once_and_is_said_to() -> None:
    called = """%inner (p: f32[8]) -> f32[8] {
  ROOT %ag = f32[8]{0} all-gather(%p), dimensions={0}
}

%body.1 (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %ar.2 = f32[8]{0} all-reduce(%x), to_apply=%add
  %f = f32[8]{0} fusion(%ar.2), kind=kLoop, calls=%inner
}

%cond.1 (p: (s32[], f32[8])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

"""
    found = collectives(module(
        "%w = (s32[], f32[8]{0}, /*index=2*/f32[8]{0:T(256)}) while(%t), condition=%cond.1, body=%body.1, metadata={}",
        "%ar = f32[8]{0} all-reduce(%x), to_apply=%add",
        before=called,
    ))  # fmt: skip
    assert found == {"all-reduce": row(2, 64, in_loop=1), "all-gather": row(1, 32, in_loop=1)}


@pytest.mark.parametrize(
    ("shape", "size"),
    [("pred[9]", 9), ("s4[3]", 2), ("f8e4m3fn[4,4]{1,0}", 16), ("c64[2]", 16), ("u32[]", 4), ("f32[<=8,2]", 64)],
)
def test_every_type_has_its_size(shape: str, size: int) -> None:
    assert collectives(module(f"%g = {shape} all-gather(%x), dimensions={{0}}")) == {"all-gather": row(1, size)}


@pytest.mark.parametrize("text", ["", "all-reduce(", "a file\nof another kind {\n  %x = nothing\n}"])
def test_text_without_collectives_has_none(text: str) -> None:
    assert collectives(text) == {}


def test_names_that_speak_of_collectives_are_none() -> None:
    assert collectives(module(
        '%all-reduce.1 = f32[8]{0} add(%x, %all-gather), metadata={op_name="jit(f)/ all-reduce(x)"}'
    )) == {}  # fmt: skip


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("tp",))
s = lambda shape, *dims: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*dims)))
def f(x, up, down):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w[0]) @ w[1], None), x, (up, down))[0]
given = s((4, 8)), s((3, 8, 16), None, None, "tp"), s((3, 16, 8), None, "tp")
print(jax.jit(f, out_shardings=NamedSharding(mesh, P())).lower(*given).compile().as_text())
"""


@full
def test_a_compiled_loop_over_layers_has_one_sum_in_its_body() -> None:
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert collectives(done.stdout) == {"all-reduce": row(1, 4 * 8 * 4, in_loop=1)}
