"""`llmc cache show --stablehlo|--hlo`: the program of an XLA executable."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.writer import write_bundle
from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import Key
from llmc.artifacts.store.store import Store
from llmc.compiler.targets.xla.show import hlo_proto, stablehlo_text
from llmc.platforms import install_line
from llmc.runtime.executors.envelope import ExecutableFile, write_envelope
from llmc.runtime.executors.xla.envelope import FORM, StepHeader, Tensor
from tests.artifacts.helpers import manifest
from tests.cli.helpers import Llmc

X, CACHE = Tensor("x", (4, 8), "float32", (None, None)), Tensor("cache", (16,), "float32", (None,))
Y, IDS = Tensor("y", (4, 4), "float32", (None, None)), Tensor("ids", (4, 2), "int32", (None, None))
STEP = StepHeader("cpu", "cpu", 1, "0.10.2 0.10.2", "step", (X, CACHE), (Y, IDS, CACHE), ((2, 1),))


def step(x: Any, cache: Any) -> Any:
    """A product that each platform has a way of its own for, the largest of it, and a cache updated in a loop."""
    from jax import lax, numpy

    y = numpy.dot(x, x.T, precision="highest")
    filled = lax.fori_loop(0, 4, lambda i, held: lax.dynamic_update_slice(held, y[i], (i * 4,)), cache)
    return y, lax.top_k(y, 2)[1], filled


def exported(platforms: tuple[str, ...]) -> bytes:
    import jax
    from jax import export

    shapes = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in STEP.inputs]
    function = jax.jit(step, donate_argnums=(1,))
    return bytes(export.export(function, platforms=platforms)(*shapes).serialize())


@pytest.fixture(scope="module")
def file() -> bytes:
    sections = {"native": b"machine code", "export": exported(("cpu", "tpu", "cuda"))}
    return write_envelope(STEP.to_json(), sections, FORM)


def publish(cache: Path, data: bytes, **components: str) -> str:
    store = Store(cache)
    return store.publish(Key("executable", components), {"executable": store.put_bytes(data)}).key.digest


@pytest.fixture
def key(file: bytes, tmp_path: Path) -> str:
    return publish(tmp_path / "cache", file, target="xla")


@pytest.fixture
def xla_bundle(file: bytes, tmp_path: Path) -> Path:
    """A bundle of three executables, and a program named as a file."""
    small = write_envelope(StepHeader("cpu", "cpu", 1, "0.10.2", "slots", (), (), ()).to_json(), {}, FORM)
    digest, other = digest_bytes(file), digest_bytes(small)
    blobs = {digest: tmp_path / "file", other: tmp_path / "small"}
    blobs[digest].write_bytes(file)
    blobs[other].write_bytes(small)
    executables = [
        {"phase": phase, "batch": batch, "query": 1, "context": 64, "state": "native", "blob": blob, "buckets": 1,
         "key": digest}
        for phase, batch, blob in (("decode", 1, other), ("decode", 4, digest), ("prompt", 4, other))
    ]  # fmt: skip
    built = manifest(
        target="xla", executables=executables, files={"slot_copy": other},
        blobs={blob: path.stat().st_size for blob, path in blobs.items()},
    )  # fmt: skip
    return write_bundle(tmp_path / "xla-bundle", built, blobs)


def signature(text: str) -> str:
    (line,) = [line for line in text.splitlines() if " @main(" in line]
    return line


def test_stablehlo_is_the_program_for_the_executables_own_platform(llmc: Llmc, key: str) -> None:
    ran = llmc("cache", "show", key, "--stablehlo")
    assert ran.code == 0, ran
    assert ran.out.startswith("module @jit_step") and ran.out.endswith("}\n")
    assert "stablehlo.dot_general" in ran.out
    assert "stablehlo.case" not in ran.out, "a choice by platform"
    assert "(%arg0: tensor<4x8xf32>, %arg1: tensor<16xf32> {tf.aliasing_output = 2 : i32})" in signature(ran.out)
    assert "loc(" not in ran.out


def test_a_program_of_one_platform_is_shown_as_well() -> None:
    one = ExecutableFile.parse(write_envelope(STEP.to_json(), {"export": exported(("cpu",))}, FORM), "one", FORM)
    assert "(%arg0: tensor<4x8xf32>, %arg1: tensor<16xf32>" in signature(stablehlo_text(one))


def test_a_graph_for_several_devices_is_shown_whole_with_its_shardings() -> None:
    import jax
    from jax import export
    from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

    cut = NamedSharding(AbstractMesh((2,), ("tp",)), PartitionSpec(None, "tp"))
    shape = jax.ShapeDtypeStruct((4, 8), "float32", sharding=cut)
    blob = export.export(jax.jit(lambda x: x @ x.T), platforms=("cpu", "tpu"))(shape).serialize()
    x = Tensor("x", (4, 8), "float32", (None, "tp"))
    header = StepHeader("tpu", "v5e:2x2", 2, "0.10.2", "step", (x,), (Y,), ())
    envelope = ExecutableFile.parse(write_envelope(header.to_json(), {"export": bytes(blob)}, FORM), "sharded", FORM)
    text = stablehlo_text(envelope)
    assert '%arg0: tensor<4x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"tp"}]>}' in signature(text)
    assert b"sdy.sharding" in hlo_proto(envelope)


def test_showing_a_program_starts_no_device(file: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(file)
    script = """
import sys
from pathlib import Path
from llmc.compiler.targets.xla.show import hlo_proto, stablehlo_text
from llmc.runtime.executors.envelope import ExecutableFile
from llmc.runtime.executors.xla.envelope import FORM
envelope = ExecutableFile.parse(Path(sys.argv[1]).read_bytes(), "file", FORM)
assert stablehlo_text(envelope) and hlo_proto(envelope)
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script, tmp_path / "file"], check=True)


def test_it_can_be_written_to_a_file(llmc: Llmc, key: str, here: Path) -> None:
    shown = llmc("cache", "show", key, "--stablehlo").out
    assert llmc("cache", "show", key, "--stablehlo", "-o", "step.mlir") == (0, "", "")
    assert (here / "step.mlir").read_text() == shown
    assert [path.name for path in here.iterdir()] == ["step.mlir"]
    assert "cannot be written" in llmc("cache", "show", key, "--stablehlo", "-o", "no/step.mlir").failed(2)


def test_the_hlo_proto_computes_the_same(llmc: Llmc, key: str, here: Path) -> None:
    import jax
    import numpy as np
    from jaxlib import _hlo, _jax

    assert llmc("cache", "show", key, "--hlo", "-o", "step.pb") == (0, "", "")
    proto = (here / "step.pb").read_bytes()
    text = _hlo.XlaComputation(proto).as_hlo_text()
    assert "conditional" not in text
    assert "topk(" not in text, "neuronx-cc's XLA does not know it"
    assert "while(" in text
    assert "entry_computation_layout={(f32[4,8]{1,0}, f32[16]{0})->" in text
    assert "input_output_alias={ {2}: (1, {}, may-alias) }" in text

    device = jax.devices("cpu")[0]
    module = _jax.mlir.xla_computation_to_mlir_module(_hlo.XlaComputation(proto))
    devices = _jax.DeviceList((device,))
    program = device.client.compile_and_load(module, devices, _jax.CompileOptions())
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    given = [jax.device_put(value, device) for value in (x, np.zeros(16, np.float32))]
    found = [part[0] for part in program.execute_sharded(given).disassemble_into_single_device_arrays()]
    for expected, built in zip(jax.jit(step)(x, np.zeros(16, np.float32)), found, strict=True):
        np.testing.assert_allclose(built, expected, rtol=1e-6)


def test_hlo_is_binary_and_wants_a_file(llmc: Llmc, key: str) -> None:
    assert "give its name with -o" in llmc("cache", "show", key, "--hlo").failed(2)


@pytest.mark.parametrize("graph", ["decode batch=4", "batch=4 decode", "decode batch=4 query=1 context=64"])
def test_an_executable_of_a_bundle_is_named_as_it_is_listed(llmc: Llmc, xla_bundle: Path, graph: str) -> None:
    assert "stablehlo.dot_general" in llmc("cache", "show", xla_bundle, "--stablehlo", "--executable", graph).out


def test_an_executable_that_a_bundle_does_not_have(llmc: Llmc, xla_bundle: Path) -> None:
    show = ("cache", "show", xla_bundle, "--stablehlo")
    assert llmc(*show, "--executable", "decode batch=5").failed(2) == (
        f"{xla_bundle} has no executable 'decode batch=5'; it has 'decode batch=1 query=1 context=64', 'decode batch=4 "
        "query=1 context=64', 'prompt batch=4 query=1 context=64'"
    )
    assert "'decode batch=4 query=1 context=64'; choose one" in llmc(*show, "--executable", "decode").failed(2)
    assert "choose one with --executable" in llmc(*show).failed(2)


def test_another_program_of_a_bundle_is_named_by_its_file(llmc: Llmc, xla_bundle: Path) -> None:
    show = ("cache", "show", xla_bundle, "--stablehlo", "--executable", "slot_copy")
    assert "no section 'export'" in llmc(*show).failed(5)


def test_an_output_of_an_entry_is_named_likewise(llmc: Llmc, file: bytes, tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    entry = store.publish(
        Key("slots", {"target": "xla"}), dict.fromkeys(("slot_copy", "slot_read"), store.put_bytes(file))
    )
    assert "has 'slot_copy', 'slot_read'; choose" in llmc("cache", "show", entry.key.short, "--stablehlo").failed(2)
    assert "@main" in llmc("cache", "show", entry.key.short, "--stablehlo", "--executable", "slot_read").out


def test_what_is_no_xla_executable_is_refused_by_its_target(llmc: Llmc, bundle: Path, tmp_path: Path) -> None:
    key = publish(tmp_path / "cache", b"an ONNX model", target="cpu")
    assert "is not an XLA executable (cpu); --stablehlo and --hlo show those of devices xla and tpu" in llmc(
        "cache", "show", key, "--stablehlo"
    ).failed(2)
    said = llmc("cache", "show", bundle, "--stablehlo", "--executable", "decode batch=1").failed(2)
    assert "is not an XLA executable (fake)" in said


def test_without_jax_the_install_line_is_said(llmc: Llmc, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    said = llmc("cache", "show", key, "--stablehlo").failed(3)
    assert said == f"jax is not installed; install it with: {install_line('xla')}"


@pytest.mark.parametrize("blob", [b"", b"not a program", bytes(1000)])
def test_a_portable_program_that_cannot_be_read_is_an_artifact_error(llmc: Llmc, tmp_path: Path, blob: bytes) -> None:
    key = publish(tmp_path / "cache", write_envelope(STEP.to_json(), {"export": blob}, FORM), target="xla")
    said = llmc("cache", "show", key, "--stablehlo").failed(5)
    assert "cannot read the portable program, made by jax 0.10.2" in said
    assert "compile it again" in said


def test_a_damaged_file_is_an_artifact_error(llmc: Llmc, file: bytes, tmp_path: Path) -> None:
    key = publish(tmp_path / "cache", file[:-1], target="xla")
    assert "damaged" in llmc("cache", "show", key, "--hlo", "-o", "step.pb").failed(5)


@pytest.mark.parametrize("flags", [("--stablehlo", "--hlo"), ("--sbom", "--hlo"), ("--stablehlo", "--json")])
def test_one_thing_is_shown_at_a_time(llmc: Llmc, key: str, flags: tuple[str, ...]) -> None:
    assert "give one of them" in llmc("cache", "show", key, *flags).failed(2)


@pytest.mark.parametrize("flags", [("-o", "file"), ("--executable", "decode")])
def test_flags_of_programs_belong_to_programs(llmc: Llmc, key: str, flags: tuple[str, ...]) -> None:
    assert "need --stablehlo or --hlo" in llmc("cache", "show", key, *flags).failed(2)


def test_the_same_executable_gives_the_same_bytes(file: bytes) -> None:
    envelope = ExecutableFile.parse(file, "file", FORM)
    assert stablehlo_text(envelope) == stablehlo_text(envelope)
    assert hlo_proto(envelope) == hlo_proto(envelope)
