"""XLA on this host's CPU: compiled, verified with poison, replayed without torch and without unpickling anything."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import CompileResult, compile_bundle
from llmc.compiler.targets import open_target
from llmc.errors import ArtifactError, DeviceError, InputError, UnknownNameError
from llmc.platforms import install_line
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.compilations import CompilationCounter
from llmc.runtime.executors.envelope import ExecutableFile, write_envelope
from llmc.runtime.executors.xla.envelope import FORM
from llmc.runtime.executors.xla.programs import LoadedProgram
from llmc.runtime.executors.xla.slot_executor import SLOT_PROGRAMS
from llmc.runtime.llm import BundleLLM
from tests.compiler import tiny
from tests.compiler.compiled import Compiled
from tests.compiler.targets.xla.unoptimised import unoptimised
from tests.tiers import full

CASE = "mistral"
PROMPTS = [[5, 80, 3, 200, 17, 9, 9, 31, 4], list(range(40, 66)), [7]]
GREEDY = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    requested = {"device": "xla", "verify": "none"}
    return Compiled.first(
        tmp_path_factory.mktemp("xla"), CASE, tiny.tiny_plan(), requested, verify="all", sample_top_k=4
    )


@pytest.fixture(scope="module")
def seven_slots(compiled: Compiled) -> CompileResult:
    """The same model, compiled from Python for a plan of fewer buckets."""
    import llmc

    return llmc.compile(
        compiled.model, compiled.path.with_name("seven"), device="xla", plan=tiny.kinds_plan(), store=compiled.store,
        verify="none", sample_top_k=4, cache_slots=7,
    )  # fmt: skip


def tokens(llm: BundleLLM) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate(PROMPTS, GREEDY)]


def test_every_bucket_is_native_equal_to_the_reference_and_tight(compiled: Compiled) -> None:
    result = compiled.result

    assert (result.native, result.portable) == (5, 0)
    assert result.verification["top1"] == 1
    assert result.verification["mean_kl"] < 1e-9
    assert result.verification["leak"] == 0
    assert result.verification["greedy_equal"] == result.verification["greedy_sequences"]


def test_tokens_are_those_of_the_model_and_nothing_is_compiled_while_serving(compiled: Compiled) -> None:
    with BundleLLM(compiled.path) as llm:
        assert tokens(llm) == [tiny.greedy(CASE, prompt, 9) for prompt in PROMPTS]
        assert llm.compilations == 0


def test_a_bundle_opens_and_generates_in_a_process_without_torch(compiled: Compiled) -> None:
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers") or name.startswith("llmc.compiler"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
from llmc.runtime.llm import BundleLLM
from llmc.runtime.engine.sampling import SamplingParams
import json
with BundleLLM({str(compiled.path)!r}) as llm:
    out = llm.generate({PROMPTS!r}, SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))
    print(json.dumps([[list(o.outputs[0].token_ids) for o in out], llm.compilations]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    built, compilations = json.loads(done.stdout)

    assert built == [tiny.greedy(CASE, prompt, 9) for prompt in PROMPTS]
    assert compilations == 0


def test_executables_depend_on_shapes_and_not_on_weights(compiled: Compiled, tmp_path: Path) -> None:
    other = tiny.write_model(tmp_path / "model", CASE)
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-400:] = bytes(400)
    weights.write_bytes(data)

    requested = CompileOptions("xla", verify="none", sample_top_k=4)
    result = compile_bundle(str(other), tmp_path / "b", tiny.tiny_plan(), requested, compiled.store, lambda _: None)

    assert (result.built, result.reused) == (0, 5)


@full
def test_layers_rolled_into_one_body_give_the_same_tokens(compiled: Compiled, tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", "llama-three-layers")
    requested = CompileOptions.of("xla", verify="all", roll_layers=True)
    result = compile_bundle(str(model), tmp_path / "b", tiny.kinds_plan(), requested, compiled.store, lambda _: None)

    assert result.verification["greedy_equal"] == result.verification["greedy_sequences"]
    placed = json.loads(Bundle.open(tmp_path / "b").files.read("weights.json"))
    assert placed["model.layers.*.mlp.up_proj.weight"]["shape"][0] == 3


@full
def test_another_jax_opens_the_portable_program_and_counts_it(
    seven_slots: CompileResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmc.runtime.executors.xla.programs.toolchain_version", lambda _: "0.11.0 0.11.0")
    with unoptimised(), BundleLLM(seven_slots.bundle) as llm:
        assert tokens(llm) == [tiny.greedy(CASE, prompt, 9) for prompt in PROMPTS]
        assert llm.compilations == len(SLOT_PROGRAMS) + 3
        assert "decode" in " ".join(llm.executor.compilations.compiled)
    monkeypatch.setenv("VLLM_XLA_CHECK_RECOMPILATION", "1")
    asks = "compiled when the bundle was opened, and VLLM_XLA_CHECK_RECOMPILATION requests"
    with unoptimised(), pytest.raises(DeviceError, match=asks):
        BundleLLM(seven_slots.bundle)


def test_what_jax_compiles_for_a_step_is_counted_whatever_the_manifest_says(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    import jax

    with BundleLLM(compiled.path) as llm:
        llm.executor.open_all()
        llm.executor.compilations.ready()
        tokens(llm)
        jax.jit(lambda x: x * 3)(1.0)  # somebody else's
        assert llm.compilations == 0
        run = LoadedProgram.run

        def compiling(program: LoadedProgram, arguments: Any) -> Any:
            jax.jit(lambda x: x + 1)(np.zeros(3))
            return run(program, arguments)

        monkeypatch.setattr(LoadedProgram, "run", compiling)
        llm.generate([[5]], SamplingParams(max_tokens=1, temperature=0))
        assert llm.compilations == llm.engine.stats.compilations > 0
        assert llm.executor.compilations.compiled[0].startswith("jax: ")


def test_an_executable_that_was_damaged_is_never_opened(compiled: Compiled, tmp_path: Path) -> None:
    import shutil

    path = Path(shutil.copytree(compiled.path, tmp_path / "b"))
    bundle = Bundle.open(path)
    blob = bundle.files.path(bundle.manifest.executables[0].blob)
    blob.write_bytes(blob.read_bytes()[:-1] + b"\x80")

    with closing(open_executor(Bundle.open(path))) as executor, pytest.raises(ArtifactError, match="digest"):
        executor.open_all()


def test_what_xla_cannot_open_is_an_error_that_says_so(compiled: Compiled) -> None:
    from llmc.runtime.executors.xla.client import open_client
    from llmc.runtime.executors.xla.hosts import HOSTS
    from llmc.runtime.executors.xla.programs import LoadedProgram

    opened = Bundle.open(compiled.path)
    envelope = ExecutableFile.parse(opened.files.read(opened.manifest.executables[0].blob), "x", FORM)
    broken = write_envelope(envelope.header, {"native": b"\x80\x05garbage", "export": b"\x00" * 64}, FORM)

    files = SimpleNamespace(read=lambda _: broken, require_native=lambda _: None)
    bundle = SimpleNamespace(path="a bundle", files=files)
    with pytest.raises(ArtifactError, match=r"a bundle: x: .*compile the bundle again"):
        LoadedProgram(bundle, "blob", "x", HOSTS["cpu"], open_client("cpu"), CompilationCounter())  # type: ignore[arg-type]


def test_more_slots_than_were_compiled_are_refused_with_the_flag_that_gives_them(compiled: Compiled) -> None:
    with pytest.raises(InputError, match="--cache-slots 9"):
        open_executor(Bundle.open(compiled.path), slots=9)


def test_another_cpu_is_refused_unless_it_compiles_anew(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.runtime.host.host_features", lambda: ("x86_64",))

    with pytest.raises(DeviceError, match=r"which this one lacks; compile it here: llmc compile"):
        open_executor(Bundle.open(compiled.path))


def test_weights_that_are_not_what_an_executable_takes_are_refused(compiled: Compiled) -> None:
    from llmc.runtime.executors.xla.client import open_client
    from llmc.runtime.executors.xla.envelope import Tensor
    from llmc.runtime.executors.xla.slot_executor import JaxArrays

    weights = JaxArrays(Bundle.open(compiled.path), open_client("cpu"))
    with pytest.raises(ArtifactError, match=r"no model\.absent"):
        weights.weight(Tensor("model.absent", (2,), "float32", (None,)))
    with pytest.raises(ArtifactError, match=r"model\.norm\.weight is float32 \[64\], the executable takes"):
        weights.weight(Tensor("model.norm.weight", (65,), "float32", (None,)))


def test_weights_are_views_of_the_file_that_all_processes_share(compiled: Compiled) -> None:
    from llmc.runtime.executors.xla.client import open_client
    from llmc.runtime.executors.xla.envelope import Tensor
    from llmc.runtime.executors.xla.slot_executor import JaxArrays

    weights = JaxArrays(Bundle.open(compiled.path), open_client("cpu"))
    array = weights.weight(Tensor("model.norm.weight", (64,), "float32", (None,)))

    start = np.frombuffer(weights._views._mapped, np.uint8).ctypes.data
    assert start <= array.unsafe_buffer_pointer() < start + weights.weight_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"specialise": False}, "--no-specialise is not offered for device xla"),
        ({"tensor_parallel": 0}, "--tensor-parallel 0 must be at least 1"),
        ({"lowering": "torch-xla", "roll_layers": True}, "--roll-layers works with --lowering jax"),
        ({"roll_layers": True, "sample_top_k": 4}, "cannot be rolled into one body: it has 2 layers"),
    ],
)
def test_bad_options_are_refused_with_what_to_do(
    compiled: Compiled, tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        compiled.compile(tmp_path / "b", **options)


def test_an_unknown_lowering_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="jax, torch-xla"):
        open_target("xla").configure(CompileOptions.of("xla", lowering="tvm"))


def test_a_detail_behind_a_device_that_has_none_is_refused() -> None:
    with pytest.raises(InputError, match="device xla takes no detail after the colon"):
        open_target("xla:2")


def test_xla_flags_and_versions_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = open_target("xla").toolchain()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")

    assert set(plain) == {"jax", "jaxlib"}
    assert open_target("xla").toolchain() == {**plain, "XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}


def test_without_jax_the_error_has_the_line_that_installs_it(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import metadata

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("llmc.runtime.executors.xla.client.metadata.version", missing)

    with pytest.raises(DeviceError, match=rf"jax is not installed; install it with: {re.escape(install_line('xla'))}"):
        open_executor(Bundle.open(compiled.path))


def test_default_rolling_falls_back_where_layers_cannot_be_rolled(
    compiled: Compiled, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmc.compiler.targets.xla.target import XlaCpuTarget

    monkeypatch.setattr(XlaCpuTarget, "rolls_by_default", True)
    with caplog.at_level(logging.INFO, logger="llmc"):
        result = compiled.compile(tmp_path / "b", sample_top_k=4)

    assert result.reused == 5
    assert "layers are not rolled into one body: it has 2 layers" in caplog.text


def test_a_bundle_of_a_configuration_alone_is_bound_to_weights_and_gives_the_model_s_tokens(
    compiled: Compiled, tmp_path: Path
) -> None:
    from llmc.compiler.pipeline.bind import bound

    requested = CompileOptions("xla", sample_top_k=4)
    config = str(compiled.model / "config.json")
    built = compile_bundle(config, tmp_path / "b", tiny.tiny_plan(), requested, compiled.store, lambda _: None)

    assert (built.built, built.reused) == (0, 5)
    with pytest.raises(ArtifactError, match=r"holds no weights; name them when it is opened: --weights MODEL"):
        open_executor(Bundle.open(tmp_path / "b"))
    opened = bound(tmp_path / "b", str(compiled.model), compiled.store)
    with BundleLLM(opened) as llm:
        assert tokens(llm) == [tiny.greedy(CASE, prompt, 9) for prompt in PROMPTS]


@full
def test_over_two_devices_of_the_host_tokens_are_those_of_one(compiled: Compiled, tmp_path: Path) -> None:
    code = f"""
import json
from pathlib import Path
from types import SimpleNamespace
from llmc.artifacts.store.store import Store
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.runtime.llm import BundleLLM
from llmc.runtime.engine.sampling import SamplingParams
from tests.compiler import tiny
from tests.compiler.targets.xla.unoptimised import unoptimised
asked = CompileOptions.of("xla", verify="all", tensor_parallel=2, sample_top_k=4)
unoptimised().__enter__()
made = compile_bundle({str(compiled.model)!r}, Path({str(tmp_path / "b")!r}), tiny.kinds_plan(), asked,
                      Store({str(compiled.store.root)!r}), lambda _: None)
with BundleLLM({str(tmp_path / "b")!r}) as llm:
    out = llm.generate({PROMPTS!r}, SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))
    tokens = [list(o.outputs[0].token_ids) for o in out]
print(json.dumps([made.analysis, made.verification, tokens]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    analysis, verification, built = json.loads(done.stdout)

    assert built == [tiny.greedy(CASE, prompt, 9) for prompt in PROMPTS]
    assert verification["leak"] == 0
    assert verification["greedy_equal"] == verification["greedy_sequences"]
    assert analysis["executables"][0]["collectives"]["all-reduce"]["count"] >= 2 * 2


def test_a_process_whose_jax_has_too_few_devices_is_reported_to_be_a_new_one(compiled: Compiled) -> None:
    from llmc.runtime.executors.xla.client import open_client

    open_client("cpu")[0].client.live_arrays()

    with pytest.raises(DeviceError, match=r"64 cpu devices are needed, this process has \d+; JAX was started in it"):
        open_client("cpu", 64)


@pytest.mark.parametrize("options", [{"tensor_parallel": 2}, {"roll_layers": False}, {"cache_slots": 3}])
def test_options_of_xla_are_refused_for_other_devices(options: dict[str, object]) -> None:
    name = next(iter(options)).replace("_", "-")

    with pytest.raises(InputError, match=rf"--{name} is for cuda, (neuron, )?tpu, xla; leave it out"):
        open_target("cpu").configure(CompileOptions.of("cpu", **options))  # type: ignore[arg-type]


@full
def test_from_python_the_same_options_make_the_same_bundle(seven_slots: CompileResult) -> None:
    import llmc

    assert seven_slots.built == 3
    assert Bundle.open(seven_slots.bundle).manifest.options["cache_slots"] == 7
    with llmc.LLM(str(seven_slots.bundle), prefix_slots=4) as llm:
        assert llm.executor.slots == 7
