"""What torch-xla makes of a program: JAX's numbers, nothing folded in, and the TPU compiler takes it.

Not in the default run: `make torch-xla-env`, then `pytest -m torch_xla`.
"""

from __future__ import annotations

import copy
import re
from functools import cache
from typing import Any

import numpy as np
import pytest

from llmc.errors import CompileError
from llmc.runtime.portable_program import write_archive
from llmc.settings import Settings
from tests.compiler.targets.xla.bucket_steps import BUCKETS, assert_right, compiled, inputs, special, step_of

pytestmark = pytest.mark.torch_xla


@cache
def built_by_torch_xla(bucket: str) -> tuple[Any, bytes]:
    """The core, and the module in it."""
    from llmc.compiler.targets.xla.torch_xla import TorchXlaCore, export, find_python

    built = export(write_archive(special(bucket)), find_python(Settings.from_environment().torch_xla_python))
    return TorchXlaCore(special(bucket), built), built.module


def module_text(core: Any) -> str:
    from jax.interpreters import mlir

    with mlir.make_ir_context():
        return str(core._module.load())


@pytest.mark.parametrize("bucket", BUCKETS)
def test_torch_xlas_module_computes_what_jaxs_computes(bucket: str) -> None:
    assert_right(compiled(built_by_torch_xla(bucket)[0], bucket)(*inputs(bucket)), bucket)


def test_torch_xla_makes_the_same_bytes_again() -> None:
    before = built_by_torch_xla("decode")[1]
    built_by_torch_xla.cache_clear()
    assert built_by_torch_xla("decode")[1] == before


@pytest.mark.parametrize("bucket", BUCKETS)
def test_torch_xlas_module_has_no_constant_of_a_weights_size_and_no_custom_call(bucket: str) -> None:
    core, _ = built_by_torch_xla(bucket)
    smallest = min(weight.size for weight in inputs(bucket)[6:] if weight.ndim > 1)
    text = module_text(core)
    for dims in re.findall(r"stablehlo\.constant dense<[\"\[].*tensor<((?:\d+x)*)[a-z]", text):
        assert np.prod([int(d) for d in dims.split("x") if d]) < smallest
    assert "custom_call" not in text
    assert "HIGHEST" in text
    unread = set(range(len(core._inputs))) - set(core._arguments)
    assert [core._inputs[i] for i in unread] == ["weights_model_rotary_emb_original_inv_freq"]


@pytest.mark.parametrize("bucket", ["decode", "chunk"])
def test_of_equal_logits_the_lower_id_comes_first(bucket: str) -> None:
    core, _ = built_by_torch_xla(bucket)
    given = inputs(bucket)
    head = 6 + core.weights.index("lm_head.weight")
    given[head] = given[head] * 0
    assert np.asarray(compiled(core, bucket)(*given)[2]).tolist() == [[0, 1, 2, 3]] * BUCKETS[bucket][0]
    assert module_text(core).count("is_stable = true") == 1


@pytest.mark.parametrize("bucket", BUCKETS)
def test_the_tpu_compiler_takes_torch_xlas_step(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    monkeypatch.setenv("TPU_LOG_DIR", "disabled")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    slice_ = topologies.get_topology_desc(platform="tpu", topology_name="v5e:1x1", chips_per_host_bounds=[1, 1, 1])
    index = SingleDeviceSharding(slice_.devices[0])
    given = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=index) for a in inputs(bucket)]
    step = jax.jit(step_of(built_by_torch_xla(bucket)[0], bucket), donate_argnums=(4, 5), keep_unused=True)
    executable = step.trace(*given).lower(lowering_platforms=("tpu",)).compile()
    assert executable.memory_analysis().alias_size_in_bytes >= 2 * inputs(bucket)[4].nbytes
    assert len(executable.runtime_executable().serialize()) > 0


@pytest.mark.parametrize(
    ("operator", "message"),
    [("i0.default", "i0.default .after model.layers.0.mlp.gate_proj.weight."), ("no.such", "is not an ATen operator")],
)
def test_an_operator_that_torch_xla_cannot_lower_is_named_with_its_layer(operator: str, message: str) -> None:
    from llmc.compiler.targets.xla.torch_xla import export, find_python

    program = copy.deepcopy(special("prompt"))
    node = next(n for n in program["graph_module"]["graph"]["nodes"] if "silu" in n["target"])
    node["target"] = f"torch.ops.aten.{operator}"
    with pytest.raises(CompileError, match=message):
        export(write_archive(program), find_python(Settings.from_environment().torch_xla_python))
