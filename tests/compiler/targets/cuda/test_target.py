"""NVIDIA GPUs without a GPU: executables for a described card, what they need of it, and their portable half on CPU."""

from __future__ import annotations

import os
import re
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import pytest

from llmc.artifacts.store.store import Store
from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan, Provenance
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.compiler.pipeline.executors.base import compile_in_worker
from llmc.compiler.stages import Stages
from llmc.compiler.targets import open_target
from llmc.compiler.targets.base import Lowered, Shape
from llmc.compiler.targets.cuda.toolkit import PACKAGES
from llmc.compiler.targets.xla.target import analysis_lines
from llmc.errors import CompileError, DeviceError, InputError
from llmc.platforms import install_line
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors.envelope import ExecutableFile
from llmc.runtime.executors.xla.envelope import FORM
from tests.compiler import tiny
from tests.compiler.compiled import Compiled
from tests.tiers import full

CASE = "llama-three-layers"
DEVICE = "cuda:h100"
PLAN = Plan(Limits(32, 2, 32, 8), (Bucket("prompt", 1, 32, 0), Bucket("decode", 2, 1, 32)), Provenance("test"))
SITE = str(Path(next(iter(find_spec("jax").submodule_search_locations))).parent)  # type: ignore[union-attr, arg-type]

needs_plugin = pytest.mark.skipif(find_spec("jax_cuda13_plugin") is None, reason="XLA's plug-in is not installed")


REQUESTED = {"device": DEVICE, "verify": "none", "dtype": "bf16"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled.first(tmp_path_factory.mktemp("cuda"), CASE, PLAN, REQUESTED, verify="all")


@needs_plugin
def test_executables_are_native_and_their_portable_half_is_verified_here(compiled: Compiled) -> None:
    result = compiled.result

    assert (result.native, result.portable, result.built) == (2, 0, 2)
    assert result.verification["leak"] == 0
    assert result.verification["mean_kl"] < 0.02


@needs_plugin
def test_the_manifest_says_which_gpu_and_what_it_must_hold(compiled: Compiled) -> None:
    manifest = Bundle.open(compiled.path).manifest
    analysis = manifest.options["analysis"]
    memory = analysis["device_memory"]

    assert (manifest.target, manifest.device) == ("cuda", DEVICE)
    assert analysis["gpu"] == {"name": "h100", "product": "NVIDIA H100 80GB HBM3", "compute_capability": "9.0"}
    assert memory["total"] == sum(memory[part] for part in ("weights", "cache", "temporary", "code"))
    assert all(memory[part] > 0 for part in memory)
    assert analysis["tuning"].items() >= {"by": "model", "tuned": 0}.items()
    assert analysis["tuning"]["of"] > 0
    assert memory["available"] == int(84_942_979_072 * 0.9)
    assert {"jax", "jaxlib", *PACKAGES} <= set(manifest.toolchain)
    assert "one device of h100: weights" in analysis_lines(analysis)[0]


@needs_plugin
def test_every_executable_holds_machine_code_changes_the_cache_in_place_and_names_no_path(compiled: Compiled) -> None:
    bundle = Bundle.open(compiled.path)
    for executable in bundle.manifest.executables:
        data = bundle.files.read(executable.blob)
        envelope = ExecutableFile.parse(data, str(executable), FORM)
        native = bytes(envelope.section("native"))

        assert envelope.header["platform"] == "cuda"
        assert envelope.header["jax"] == f"{version('jax')} {version('jaxlib')} {version('jax-cuda13-pjrt')}"
        assert envelope.header["memory"]["aliased"] == 2 * 3 * 4 * 2 * 128 * 16 * 2
        assert b"\x7fELF" in native
        assert SITE.encode() not in native
        assert str(Path(__file__).parents[4]).encode() not in native


def prepared(compiled: Compiled) -> tuple[Lowered, CompileOptions]:
    target = open_target(DEVICE)
    options = target.configure(CompileOptions(DEVICE, dtype="bf16"))
    stages = Stages(compiled.store, open_checkpoint(compiled.model), PLAN, lambda _: None)
    return target.lower(stages, target.trace(stages, options), options), options


def compile_elsewhere(folder: Path, lowered: Lowered, shape: Shape, options: CompileOptions) -> bytes:
    os.chdir(folder)
    os.environ.update(PATH="/bin", HOME=str(folder), CUDA_ROOT=str(folder))
    return compile_in_worker(DEVICE, lowered, shape, options).data


@full
@needs_plugin
def test_executables_are_the_same_bytes_wherever_and_by_whichever_process_they_are_built(
    compiled: Compiled, tmp_path: Path
) -> None:
    lowered, options = prepared(compiled)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        built = pool.submit(compile_elsewhere, tmp_path, lowered, Shape("decode", 2, 1, 32), options).result()
    bundle = Bundle.open(compiled.path)

    assert built == bundle.files.read(bundle.executable("decode", 2, 1, 32).blob)


@full
@needs_plugin
def test_over_two_gpus_weights_are_split_and_sums_exchanged_once_a_layer(compiled: Compiled, tmp_path: Path) -> None:
    analysis = compiled.compile(tmp_path / "b", device="cuda:h100-2", tensor_parallel=2, roll_layers=True).analysis

    assert analysis["executables"][1]["collectives"]["all-reduce"]["in_loop"] == 2  # after attention, after the MLP
    assert analysis["device_memory"]["cache"] == compiled.result.analysis["device_memory"]["cache"] / 2
    assert (analysis["topology"], analysis["gpu"]["name"]) == ("h100-2", "h100")


@needs_plugin
def test_a_cache_that_does_not_fit_is_refused_before_anything_is_compiled(compiled: Compiled, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"does not fit h100 by [\d.,]+ GiB a GPU.*that fits: --cache-slots \d+"):
        compiled.compile(tmp_path / "b", cache_slots=3 << 21)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        ("cuda", {}, r"name the GPU, as cuda:GPU\[-COUNT\], for example cuda:h100; known GPUs: .*h100"),
        ("cuda:x9", {}, r"unknown GPU 'x9'; known GPUs: .*h100"),
        ("cuda:h100-3", {}, r"h100 is not offered with 3 a host; known: h100, h100-2, h100-4, h100-8"),
        ("cuda:h100-2", {"tensor_parallel": 4}, r"--tensor-parallel 4: topology h100-2 has 2 devices"),
    ],
)
def test_what_no_host_has_is_refused_with_what_is_known(
    tmp_path: Path, device: str, options: dict[str, object], message: str
) -> None:
    requested = CompileOptions.of(device, **options)  # type: ignore[arg-type]
    model = tiny.write_model(tmp_path / "model", CASE)
    with pytest.raises(InputError, match=message):
        compile_bundle(str(model), tmp_path / "b", PLAN, requested, Store(tmp_path / "store"), lambda _: None)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_missing_package_is_named_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    def absent(name: str) -> str:
        if name == package:
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr("llmc.compiler.targets.cuda.toolkit.metadata.version", absent)

    with pytest.raises(DeviceError, match=rf"NVIDIA GPU needs {package}; .*{re.escape(install_line('cuda'))}"):
        open_target(DEVICE).toolchain()


def test_flags_that_xla_reads_are_in_the_key_and_no_instruction_set_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.compiler.targets.cuda.toolkit.metadata.version", lambda name: f"{name} 1")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_x=1")

    assert open_target(DEVICE).toolchain()["XLA_FLAGS"] == "--xla_gpu_x=1"
    assert open_target(DEVICE).isa() == ()
