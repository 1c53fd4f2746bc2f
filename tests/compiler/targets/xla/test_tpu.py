"""TPUs without a TPU: executables for a described slice, what they need of a chip, and their portable half on CPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path

import pytest

from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan, Provenance
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.executors.base import compile_in_worker
from llmc.compiler.stages import Stages
from llmc.compiler.targets import open_target
from llmc.compiler.targets.base import Lowered, Shape
from llmc.compiler.targets.xla.target import analysis_lines
from llmc.errors import CompileError, DeviceError, InputError
from llmc.platforms import install_line
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors.envelope import ExecutableFile
from llmc.runtime.executors.xla.envelope import FORM
from llmc.runtime.llm import BundleLLM
from tests.compiler.compiled import Compiled
from tests.tiers import full

CASE = "llama-three-layers"
DEVICE = "tpu:v5e-1x1"
REQUESTED = {"device": DEVICE, "verify": "none"}
PLAN = Plan(Limits(32, 2, 32, 8), (Bucket("prompt", 1, 32, 0), Bucket("decode", 2, 1, 32)), Provenance("test"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled.first(tmp_path_factory.mktemp("tpu"), CASE, PLAN, REQUESTED, verify="all", dtype="bf16")


def test_executables_are_native_and_their_portable_half_is_verified_here(compiled: Compiled) -> None:
    result = compiled.result

    assert (result.native, result.portable, result.built) == (2, 0, 2)
    assert result.verification["leak"] == 0
    assert result.verification["mean_kl"] < 0.02


def test_what_a_chip_must_hold_is_in_the_report(compiled: Compiled) -> None:
    analysis = compiled.result.analysis
    memory = analysis["device_memory"]

    assert analysis["topology"] == "v5e-1x1"
    assert memory["total"] == sum(memory[part] for part in ("weights", "cache", "temporary", "code"))
    assert memory["available"] == 16125 << 20
    assert all(memory[part] > 0 for part in memory)
    assert "one device of v5e-1x1: weights" in analysis_lines(analysis)[0]
    assert analysis == Bundle.open(compiled.path).manifest.options["analysis"]


def test_the_cache_is_aliased_in_every_executable(compiled: Compiled) -> None:
    bundle = Bundle.open(compiled.path)
    for executable in bundle.manifest.executables:
        header = ExecutableFile.parse(bundle.files.read(executable.blob), str(executable), FORM).header
        assert header["memory"]["aliased"] == 2 * 3 * 4 * 2 * 128 * 16 * 2
        assert header["platform"] == "tpu"
        assert header["jax"] == f"{version('jax')} {version('jaxlib')} {version('libtpu')}"


@full
def test_on_this_host_a_bundle_runs_from_its_portable_programs_and_says_so(
    compiled: Compiled, caplog: pytest.LogCaptureFixture
) -> None:
    with BundleLLM(compiled.path) as llm:
        opened = llm.compilations
        out = llm.generate([[5, 80, 3]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))

        assert len(out[0].outputs[0].token_ids) == 4
        assert llm.compilations == opened > 0
    assert "are compiled here from their portable programs" in caplog.text


def prepared(compiled: Compiled) -> tuple[Lowered, CompileOptions]:
    from llmc.compiler.checkpoint import open_checkpoint

    target = open_target(DEVICE)
    options = target.configure(CompileOptions(DEVICE, dtype="bf16"))
    stages = Stages(compiled.store, open_checkpoint(compiled.model), PLAN, lambda _: None)
    return target.lower(stages, target.trace(stages, options), options), options


@full
def test_executables_are_the_same_bytes_whichever_process_makes_them(compiled: Compiled) -> None:
    inputs, options = prepared(compiled)
    shape = Shape("decode", 2, 1, 32)
    built = []
    for _ in range(2):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            built.append(pool.submit(compile_in_worker, DEVICE, inputs, shape, options).result().data)
    bundle = Bundle.open(compiled.path)

    assert built[0] == built[1] == bundle.files.read(bundle.executable("decode", 2, 1, 32).blob)
    assert str(Path(__file__).parents[4]).encode() not in built[0]


@full
def test_over_two_chips_weights_are_split_and_sums_exchanged(compiled: Compiled, tmp_path: Path) -> None:
    code = f"""
import json, sys
from tests.compiler.targets.xla.test_tpu import PLAN
from pathlib import Path
from llmc.artifacts.store.store import Store
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
asked = CompileOptions.of("tpu:v5e-2x2", dtype="bf16", tensor_parallel=2, verify="none")
made = compile_bundle({str(compiled.model)!r}, Path({str(tmp_path / "b")!r}), PLAN, asked,
                      Store({str(compiled.store.root)!r}), lambda _: None)
print(json.dumps(made.analysis))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    analysis = json.loads(done.stdout)
    decode = analysis["executables"][1]["collectives"]

    assert decode["all-reduce"]["in_loop"] == 2  # one after attention, one after the MLP
    assert analysis["tensor_parallel"]["bytes_per_device"] < 0.7 * analysis["tensor_parallel"]["bytes"]
    assert analysis["device_memory"]["cache"] == compiled.result.analysis["device_memory"]["cache"] / 2


@full
def test_arrays_of_other_caches_are_counted_as_xla_lays_them_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        built = Compiled.first(tmp_path, "qwen3_5_text", PLAN, REQUESTED, dtype="bf16")

    memory = built.result.analysis["device_memory"]
    keys, conv, recurrent = 4 * 2 * 128 * 16 * 2, 4 * 3 * 128 * 2, 4 * 4 * 8 * 128 * 4  # 96 and 16 are padded to 128
    assert memory["cache"] == 2 * keys + conv + recurrent
    assert [e["memory"]["aliased"] for e in built.result.analysis["executables"]] == [memory["cache"]] * 2
    assert "layers are not rolled into one body: it has caches of several kinds" in caplog.text


def test_a_cache_that_does_not_fit_is_refused_before_anything_is_compiled(compiled: Compiled, tmp_path: Path) -> None:
    with pytest.raises(
        CompileError, match=r"does not fit v5e-1x1 by [\d.,]+ GiB.*largest that fits: --cache-slots \d+"
    ):
        compiled.compile(tmp_path / "b", dtype="bf16", cache_slots=3 << 17)
    assert not (tmp_path / "b").exists()


def test_what_xla_finds_too_large_is_refused_by_how_much(compiled: Compiled, tmp_path: Path) -> None:
    plan = replace(PLAN, limits=Limits(32, 3 << 17, 3 << 17, 8))

    with pytest.raises(CompileError, match=r"does not fit v5e-1x1 by .*--max-num-seqs \d+ at 32 tokens"):
        compiled.compile(tmp_path / "b", plan=plan, dtype="bf16", cache_slots=None)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("tpu", r"name the slice, as tpu:GENERATION-SHAPE, for example tpu:v5e-2x2; known generations: v4"),
        ("tpu:v9-2x2", r"unknown TPU generation 'v9'.*known generations: v4, v5e, v5p, v6e, tpu7x"),
        ("tpu:v5e-3x3", r"v5e has no slice of shape 3x3; known for v5e: v5e-1x1, v5e-2x2"),
    ],
)
def test_an_unknown_topology_lists_the_known_ones(
    compiled: Compiled, tmp_path: Path, device: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        compiled.compile(tmp_path / "b", device=device)


def test_a_degree_that_the_topology_lacks_is_refused(compiled: Compiled, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--tensor-parallel 8: topology v5e-2x2 has 4 devices"):
        compiled.compile(tmp_path / "b", device="tpu:v5e-2x2", tensor_parallel=8)


def test_without_libtpu_the_error_has_the_line_that_installs_it(
    compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        if name == "libtpu":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr("llmc.compiler.stages.metadata.version", absent)

    with pytest.raises(
        DeviceError, match=rf"libtpu is not installed; install it with: {re.escape(install_line('tpu'))}"
    ):
        compiled.compile(tmp_path / "b", dtype="bf16")


def test_flags_that_libtpu_reads_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = open_target(DEVICE).toolchain()
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_x=1")

    assert set(plain) == {"jax", "jaxlib", "libtpu"}
    assert open_target(DEVICE).toolchain()["LIBTPU_INIT_ARGS"] == "--xla_tpu_x=1"
    assert open_target(DEVICE).isa() == ()
