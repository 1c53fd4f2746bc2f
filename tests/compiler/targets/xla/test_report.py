"""The lines that tell people what XLA knows of their executables, and the count of products that they rest on."""

from __future__ import annotations

from llmc.compiler.targets.xla.build import matmul_flops
from llmc.compiler.targets.xla.target import analysis_lines


def test_nothing_is_said_of_what_was_not_analysed() -> None:
    assert analysis_lines({}) == []


def test_memory_work_and_exchanges_of_a_sharded_bundle_are_reported() -> None:
    executable = {
        "memory": {"temporary": 3 << 20}, "cost": {"flops": 2_000_000_000},
        "collectives": {"all-reduce": {"count": 3, "in_loop": 2, "bytes": 10}},
    }  # fmt: skip
    reported = analysis_lines({
        "topology": "v5e-2x2",
        "device_memory": {
            "weights": 1 << 30, "cache": 1 << 30, "temporary": 3 << 20, "code": 1 << 20, "total": 2 << 30,
            "available": 4 << 30,
        },
        "executables": [executable, {**executable, "cost": {"flops": 5_000_000_000}}],
        "tensor_parallel": {
            "degree": 4, "bytes": 4 << 30, "bytes_per_device": 1 << 30, "cache": "replicated", "notes": ["3 heads …"],
        },
    })  # fmt: skip

    assert reported[0].endswith("code 1.0 MiB: 2.00 GiB of 4.00 GiB (50%)")
    assert "matmuls of 2 to 5 GFLOP a step and device, temporary memory up to 3.0 MiB" in reported[1]
    assert "6 all-reduce (4 once a layer)" in reported[2]
    assert reported[3] == "3 heads …"


def test_matmuls_count_twice_their_sizes_and_those_of_a_scan_as_often_as_it_runs() -> None:
    import jax
    import jax.numpy as jnp
    from jax import lax

    x, w = jnp.zeros((3, 4)), jnp.zeros((4, 4))

    def once(x: jax.Array) -> jax.Array:
        return x @ w

    def often(x: jax.Array) -> jax.Array:
        return lax.scan(lambda carry, _: (jnp.tanh(carry @ w), None), once(x), None, length=5)[0]

    assert matmul_flops(jax.make_jaxpr(once)(x)) == 2 * 3 * 4 * 4
    assert matmul_flops(jax.make_jaxpr(jax.jit(often))(x)) == 6 * 2 * 3 * 4 * 4
