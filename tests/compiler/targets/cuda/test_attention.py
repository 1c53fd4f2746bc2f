"""Attention as a kernel on GPUs: compiled here, in the same portable program whose plain form is verified on CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.store.store import Store
from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan, Provenance
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import CompileResult, compile_bundle
from llmc.compiler.targets import open_target
from llmc.compiler.targets.cuda.target import COMPILER_OPTIONS, CudaTarget, parse_topology
from llmc.errors import InputError, UnknownNameError
from llmc.runtime.bundle import Bundle
from llmc.runtime.cache_shape import CacheShape
from llmc.runtime.executors.envelope import ExecutableFile
from llmc.runtime.executors.xla.envelope import FORM
from llmc.runtime.executors.xla.slot_executor import STEP_INPUTS
from tests.compiler import tiny
from tests.tiers import default_cases, full

PLAN = Plan(Limits(32, 2, 32, 8), (Bucket("prompt", 1, 32, 32), Bucket("decode", 2, 1, 32)), Provenance("test"))
FP8 = "float8_e4m3fn"
needs_plugin = pytest.mark.skipif(find_spec("jax_cuda13_plugin") is None, reason="XLA's plug-in is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("model"), "qwen3_5_text")


def compile_for(device: str, model: Path, path: Path, **options: object) -> CompileResult:
    requested = CompileOptions.of(device, dtype="bf16", **options)
    return compile_bundle(str(model), path / "bundle", PLAN, requested, Store(path / "store"), lambda _: None)


@full
@needs_plugin
def test_steps_hold_the_kernel_as_machine_code_and_the_plain_form_is_verified_on_cpu(
    model: Path, tmp_path: Path
) -> None:
    """Of a model with states, over two GPUs, with keys and values in 8 bits."""
    code = f"""
import json
from pathlib import Path
from tests.compiler.targets.cuda.test_attention import compile_for
asked = dict(attention="pallas", verify="all", tensor_parallel=2, kv_cache_dtype="fp8")
print(json.dumps(compile_for("cuda:h100-2", Path({str(model)!r}), Path({str(tmp_path)!r}), **asked).verification))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # two CPU devices
    assert done.returncode == 0, done.stderr[-2000:]
    verification = json.loads(done.stdout)

    assert verification["leak"] == 0
    assert verification["mean_kl"] < 0.02
    bundle = Bundle.open(tmp_path / "bundle")
    for executable in bundle.manifest.executables:
        envelope = ExecutableFile.parse(bundle.files.read(executable.blob), str(executable), FORM)
        native = bytes(envelope.section("native"))
        assert b"pallas" in native
        assert b"\x7fELF" in native
        assert str(Path(__file__).parents[4]).encode() not in native
        assert b"triton" not in bytes(envelope.section("export")), "portable programs have the plain form"
        assert envelope.header["memory"]["temporary"] < 400_000
        assert envelope.header["collectives"].keys() <= {"all-reduce", "all-gather"}
        held = {t["name"]: t["dtype"] for t in envelope.header["inputs"][STEP_INPUTS : STEP_INPUTS + 4]}
        assert held == {"conv": "bfloat16", "recurrent": "float32", "keys": FP8, "values": FP8}
        assert envelope.header["memory"]["aliased"] == bundle.manifest.options["analysis"]["device_memory"]["cache"]


@pytest.mark.parametrize(
    ("options", "rolled"),
    [({}, False), ({"attention": "pallas"}, False), ({"attention": "pallas", "roll_layers": True}, True)],
)
def test_steps_are_rolled_only_where_it_is_requested(options: dict[str, object], rolled: bool) -> None:
    target = open_target("cuda:h100")
    requested = target.configure(CompileOptions.of("cuda:h100", dtype="bf16", **options))

    assert isinstance(target, CudaTarget)
    assert target._rolls((), CacheShape.plain(2, 1, 8), requested) is rolled


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, ("--attention pallas", "--roll-layers")),
        ({"roll_layers": True}, ("--attention pallas",)),
        ({"attention": "pallas"}, ()),
    ],
)
def test_what_would_take_less_memory_is_known(options: dict[str, object], flags: tuple[str, ...]) -> None:
    target = open_target("cuda:h100")

    assert isinstance(target, CudaTarget)
    assert target.lighter(CompileOptions.of("cuda:h100", dtype="bf16", **options)) == flags


@default_cases(1)
@needs_plugin
@pytest.mark.parametrize(
    ("gpu", "architecture", "cached", "widths"),
    [
        ("h100", b"sm_90a", "", (128, 128)),
        ("h100", b"sm_90a", "bfloat16", (192, 128)),
        ("a100", b"sm_80", "bfloat16", (512, 512)),
        ("l4", b"sm_89", FP8, (128, 128)),
    ],
)
def test_the_kernel_becomes_machine_code_of_each_architecture(
    gpu: str, architecture: bytes, cached: str, widths: tuple[int, int]
) -> None:
    """With the heads of Llama, DeepSeek V3 and Gemma 4."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from llmc.compiler.targets.xla.attention import flash_attention
    from llmc.compiler.targets.xla.cache_view import CacheView
    from llmc.runtime.executors.xla.client import open_client

    def attention(query: Any, key: Any, value: Any, keys: Any, values: Any, rows: Any) -> Any:
        views = CacheView(keys, 1, rows, "decode", 4096), CacheView(values, 1, rows, "decode", 4096)
        return flash_attention(query, key, value, views if cached else None, rows, 0.1, 0.0, -1)

    held, (width, value) = cached or "bfloat16", widths
    open_client("cpu")
    here = SingleDeviceSharding(parse_topology(gpu).describe()[0])
    given = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=here)
        for shape, dtype in [
            ((2, 8, 1, width), jnp.bfloat16), ((2, 2, 1, width), jnp.bfloat16), ((2, 2, 1, value), jnp.bfloat16),
            ((2, 3, 2, 4096, width), held), ((2, 3, 2, 4096, value), held), ((2,), jnp.int32),
        ]
    ]  # fmt: skip
    lowered = jax.jit(attention).trace(*given).lower(lowering_platforms=("cuda",))
    native = lowered.compile(compiler_options=dict(COMPILER_OPTIONS)).runtime_executable().serialize()
    assert architecture in native
    assert b"\x7fELF" in native


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"attention": "flash"}, UnknownNameError, "unknown attention 'flash'.*pallas, plain"),
        ({"attention": "pallas", "lowering": "torch-xla"}, InputError, "--attention pallas works with --lowering jax"),
        ({"attention": "pallas", "kv_cache_dtype": "fp8"}, InputError, "needs compute capability 8.9, a100 has 8.0"),
    ],
)
def test_what_cannot_be_is_refused(
    model: Path, tmp_path: Path, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        compile_for("cuda:a100", model, tmp_path, **options)
