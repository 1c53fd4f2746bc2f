"""neuronx-cc makes NEFFs of modules, and NeuronCores run them: with fakes of both, whose numbers are real."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmc.artifacts.bundle.trust import code_of_bundle
from llmc.artifacts.store.store import Store
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.compiler.pipeline.on_target import OnTargetResult, compile_on_target
from llmc.compiler.targets.neuron import neuronx_cc
from llmc.errors import ArtifactError, CompileError, DeviceError, LlmcError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.neuron.files import NATIVE, NeuronFile, write_native
from llmc.runtime.llm import BundleLLM
from tests.compiler import tiny
from tests.compiler.targets.xla.unoptimised import unoptimised
from tests.fakes.neuron.host import with_compiler, with_cores
from tests.tiers import full

pytestmark = full

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PROMPTS = [[5, 80, 3, 200, 17, 9, 9, 31, 4], [7]]


@dataclass
class Bundles:
    """A portable bundle, the finished one made of a copy of it, and their store."""

    portable: Path
    finished: Path
    store: Store
    result: OnTargetResult

    def copy(self, path: Path) -> Path:
        return shutil.copytree(self.portable, path)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    folder = tmp_path_factory.mktemp("finished")
    model, store = tiny.write_model(folder / "model", "llama"), Store(folder / "store")
    requested = CompileOptions.of("neuron:trn2", verify="none", sample_top_k=8)
    with pytest.MonkeyPatch.context() as patch, unoptimised():
        compile_bundle(str(model), folder / "portable", tiny.kinds_plan(), requested, store, lambda _: None)
        shutil.copytree(folder / "portable", folder / "finished")
        with_compiler(patch, folder)
        with_cores(patch, folder)
        result = compile_on_target(folder / "finished", store, lambda _: None, jobs=2, verify="sample")
    return Bundles(folder / "portable", folder / "finished", store, result)


@pytest.fixture
def cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cores(monkeypatch, tmp_path)


def tokens(path: Path) -> list[list[int]]:
    with closing(BundleLLM(path, threads=1)) as llm:
        found = [list(out.outputs[0].token_ids) for out in llm.generate(PROMPTS, GREEDY)]
        assert llm.compilations == 0
        return found


def test_neffs_give_what_the_modules_gave(bundles: Bundles, cores: None) -> None:
    result = bundles.result
    assert (result.native, result.portable, result.built) == (3, 0, 3)
    assert result.built_for == {"target": "trn2"}
    assert result.verification["top1"] == 1
    assert result.verification["mean_kl"] < 1e-9


def test_neuron_cores_give_the_tokens_of_this_cpu(bundles: Bundles, tmp_path: Path) -> None:
    on_cpu = tokens(bundles.portable)
    with pytest.MonkeyPatch.context() as patch:
        with_cores(patch, tmp_path)
        import nrtpy

        assert tokens(bundles.finished) == on_cpu
        assert len(nrtpy.loaded) > 4, "the programs that work on slots, and buckets"


def test_the_bundle_says_what_it_was_built_by_and_is_code(bundles: Bundles) -> None:
    manifest = Bundle.open(bundles.finished).manifest
    assert manifest.options["neuronx_cc"] == "2.27.5334.0+f702b353"
    assert manifest.options["neuronx_cc_arguments"] == (
        "--target=trn2 --lnc=2 --model-type=transformer --auto-cast=none -O1"
    )
    assert code_of_bundle(manifest)
    file = NeuronFile.parse(Bundle.open(bundles.finished).files.read("slot_copy"), "slot_copy")
    assert len(file.neffs) == 1
    assert neuronx_cc.is_neff(file.neffs[0])


def test_finished_again_comes_from_the_store(bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_compiler(monkeypatch, tmp_path)
    with_cores(monkeypatch, tmp_path)
    again = compile_on_target(bundles.copy(tmp_path / "again"), bundles.store, lambda _: None, verify="none")
    assert (again.built, again.reused) == (0, 3)


@pytest.mark.parametrize(
    ("mode", "error", "message"),
    [
        ("error", CompileError, r"neuronx-cc cannot compile .* \(exit code 70\): .*NCC_INLA001.* its log: "),
        ("killed", CompileError, r"neuronx-cc was killed \(SIGKILL\) while it compiled .*fewer --jobs; its log: "),
        ("empty", CompileError, r"neuronx-cc wrote no NEFF for .*; its log: "),
        (
            "old",
            DeviceError,
            r"cannot be compiled here: .*neuronx-cc is version 2\.9\.1\.0\+aaaaaaaa; .*install another",
        ),
        ("odd", DeviceError, r"cannot be compiled here: .*neuronx-cc --version prints no version"),
    ],
)
def test_a_compiler_that_fails_is_named_and_the_bundle_stays(
    bundles: Bundles, mode: str, error: type[LlmcError], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_compiler(monkeypatch, tmp_path, mode)
    path = bundles.copy(tmp_path / "bundle")
    with pytest.raises(error, match=message) as caught:
        compile_on_target(path, Store(tmp_path / "store"), lambda _: None, verify="none")
    assert Bundle.open(path).manifest == Bundle.open(bundles.portable).manifest
    if error is CompileError:
        log = Path(str(caught.value).rpartition("its log: ")[2])
        assert log.read_text().startswith("$ ") and "--target=trn2" in log.read_text()
        assert log.is_relative_to(tmp_path / "cache")


def test_what_was_killed_once_is_tried_again(
    bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_compiler(monkeypatch, tmp_path, "once")
    result = compile_on_target(
        bundles.copy(tmp_path / "b"), Store(tmp_path / "store"), lambda _: None, jobs=2, verify="none"
    )
    assert result.native == 3
    assert "was killed (SIGKILL)" in caplog.text and "trying once more" in caplog.text


def test_a_compiler_that_hangs_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_compiler(monkeypatch, tmp_path, "hang")
    neuronx_cc._opened.cache_clear()
    found = neuronx_cc.Compiler(str(shutil.which("neuronx-cc")), "2.27")
    arguments = ("--target=trn1", "--model-type=transformer", "--auto-cast=none", "-O1")
    with pytest.raises(CompileError, match=r"did not finish a step within 1 seconds, and was stopped; its log: "):
        found.compile(b"", "a step", arguments, 1, tmp_path / "logs")
    assert len(list((tmp_path / "logs").iterdir())) == 1, "it is not tried again"


def test_without_a_compiler_the_line_that_installs_it_is_reported(bundles: Bundles, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"neuronx-cc is not on PATH; .*pip install neuronx-cc from AWS"):
        compile_on_target(bundles.copy(tmp_path / "b"), bundles.store, lambda _: None)


def test_a_host_that_is_reported_of_no_chip_and_one_of_another_are_reported_what_to_do(
    bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_compiler(monkeypatch, tmp_path, chip="trn1")
    with pytest.raises(DeviceError, match=r"this host is for trn1, the bundle for trn2; compile it again with"):
        compile_on_target(bundles.copy(tmp_path / "b"), bundles.store, lambda _: None)
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE")
    with pytest.raises(DeviceError, match=r"no NeuronCores; to compile for trn2 anyway, set NEURON_PLATFORM_TAR"):
        compile_on_target(tmp_path / "b", bundles.store, lambda _: None)


def test_a_bundle_of_one_chip_is_refused_on_another(
    bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_cores(monkeypatch, tmp_path, "trn1.32xlarge")
    with pytest.raises(ArtifactError, match=r"compiled for another target trn2 \(here: trn1\)"):
        open_executor(Bundle.open(bundles.finished))


def test_a_host_without_neuron_cores_opens_the_portable_half(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match="this host has no such device"):
        open_executor(Bundle.open(bundles.finished))
    monkeypatch.setenv("LLMC_OPEN_PORTABLE", "1")
    with closing(open_executor(Bundle.open(bundles.finished), threads=1)) as executor:
        assert executor.capabilities.in_place_of == "neuron:trn2"


def test_cores_without_memory_for_it_say_so(bundles: Bundles, cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import nrtpy

    monkeypatch.setattr(nrtpy, "memory", 5_000)
    with pytest.raises(DeviceError, match=r"NeuronCore 0 has no memory left .*NRT_RESOURCE \(4\)"):
        open_executor(Bundle.open(bundles.finished))


def test_a_neff_that_the_runtime_refuses_is_named(bundles: Bundles, cores: None) -> None:
    from llmc.runtime.executors.neuron.executor import NeffProgram

    file = NeuronFile.parse(Bundle.open(bundles.finished).files.read("slot_copy"), "slot_copy")
    torn = bytes(file.neffs[0][:-9])
    built = {"target": "trn2", "lnc": 2, "compiler": "2.27"}
    bad = NeuronFile.parse(write_native(file, [torn], built), "slot_copy")
    with pytest.raises(
        ArtifactError, match=r"refuses its NEFF \(.*NRT_INVALID \(2\)\), made by neuronx-cc 2.27 for trn2"
    ):
        NeffProgram(bad, None, "slot_copy")  # type: ignore[arg-type] - it loads before it asks for arrays
    assert bytes(Bundle.open(bundles.finished).files.read("slot_copy")).startswith(NATIVE)
