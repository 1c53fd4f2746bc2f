"""`--device neuron` without neuronx-cc: modules that are verified on this CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmc.artifacts.bundle.trust import code_of_bundle, code_of_entry
from llmc.artifacts.key import Key
from llmc.compiler.options import CompileOptions
from llmc.compiler.targets import open_target
from llmc.compiler.targets.neuron import neuronx_cc
from llmc.errors import ArtifactError, CompileError, InputError, UnknownNameError
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors.neuron.files import NeuronFile
from tests.compiler import tiny
from tests.compiler.compiled import Compiled
from tests.compiler.targets.xla.unoptimised import unoptimised
from tests.tiers import full

REQUESTED = {"device": "neuron:trn2", "verify": "none"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    with unoptimised():
        return Compiled.first(tmp_path_factory.mktemp("neuron"), "llama", tiny.kinds_plan(), REQUESTED, verify="all")


def test_modules_give_what_the_reference_gives_and_say_what_is_left(compiled: Compiled) -> None:
    result = compiled.result
    assert (result.native, result.portable) == (0, 3)
    assert result.verification["top1"] == 1
    assert result.verification["leak"] <= 1e-4
    assert result.verification["mean_kl"] < 1e-9
    assert "neuronx-cc has to compile each module to a NEFF" in result.remaining


def test_a_module_is_data_for_one_chip_with_the_cache_in_place(compiled: Compiled) -> None:
    bundle = Bundle.open(compiled.path)
    assert code_of_bundle(bundle.manifest) is None
    for executable in bundle.manifest.executables:
        file = NeuronFile.parse(bundle.files.read(executable.blob), str(executable))
        assert (file.header.topology, file.header.devices, file.neffs) == ("trn2", 1, ())
        assert [given for _, given in file.module.aliases] == [4, 5]
        assert not file.module.operators & {"while", "sort", "call", "custom-call"}


@full
def test_the_same_again_is_the_same_bytes_and_another_chip_another_key(compiled: Compiled, tmp_path: Path) -> None:
    other = Compiled.first(tmp_path, "llama", compiled.plan, REQUESTED)
    assert compiled.compile(tmp_path / "inf2", device="neuron:inf2").built == 3
    ours, theirs = Bundle.open(compiled.path).manifest, Bundle.open(other.path).manifest
    assert [e.blob for e in ours.executables] == [e.blob for e in theirs.executables]
    assert ours.files == theirs.files


def test_what_a_core_cannot_hold_is_refused_before_anything_is_compiled(
    compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = compiled.result.analysis["core_memory"]
    assert (memory["weights"] > 1 << 17, memory["available"]) == (True, 24 << 30)
    monkeypatch.setitem(neuronx_cc.CHIPS, "trn2", neuronx_cc.NeuronChip("trn2", {1: 1 << 17, 2: 1 << 17}, 2))
    with pytest.raises(CompileError, match=r"weights take .* of a core of trn2 and the cache .*more --tensor-parallel"):
        compiled.compile(tmp_path / "b")


def test_a_damaged_program_is_an_error(compiled: Compiled) -> None:
    bundle = Bundle.open(compiled.path)
    data = bundle.files.read(bundle.manifest.executables[0].blob)
    with pytest.raises(ArtifactError, match="compile it again"):
        NeuronFile.parse(data[:-1], "a step")
    with pytest.raises(ArtifactError, match="not a Neuron program of llmc"):
        NeuronFile.parse(b"LLMCXLA1" + data[8:], "a step")


@full
def test_two_ranks_exchange_what_they_have_and_give_the_same_logits(tmp_path: Path) -> None:
    env = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    command = [sys.executable, "-m", "tests.compiler.targets.neuron.ranks", str(tmp_path)]
    done = subprocess.run(command, env=env, cwd=Path(__file__).parents[4], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    found = json.loads(done.stdout.splitlines()[-1])
    assert found["on this CPU"] < 1e-4
    assert found["on cores"] < 1e-4
    assert found["split"] == "split by key/value heads"
    assert "all-reduce" in found["operators"]
    whole, part = found["cache"]
    assert (whole[2], part[2]) == (2, 1)


def test_chips_and_their_number_of_largest_logits() -> None:
    assert open_target("neuron:inf2").configure(CompileOptions.of("neuron:inf2")).sample_top_k == 256
    assert open_target("neuron").configure(CompileOptions.of("neuron", sample_top_k=8)).sample_top_k == 8
    with pytest.raises(UnknownNameError, match=r"unknown Neuron target 'trn9'; known: inf2, trn1, trn2"):
        open_target("neuron:trn9").configure(CompileOptions.of("neuron:trn9"))
    with pytest.raises(InputError, match="--dtype f16 is not offered"):
        open_target("neuron").configure(CompileOptions.of("neuron", dtype="f16"))
    with pytest.raises(InputError, match="neuronx-cc compiles fixed shapes"):
        open_target("neuron").configure(CompileOptions.of("neuron", specialise=False))


def test_programs_of_slots_are_data_as_modules_and_code_as_neffs() -> None:
    assert code_of_entry(Key("slots", {"target": "neuron", "state": "portable"}), {}) is None
    assert code_of_entry(Key("slots", {"target": "neuron", "state": "native"}), {})
    assert code_of_entry(Key("slots", {"target": "xla"}), {})


@full
def test_a_top_k_above_the_devices_and_none_are_the_devices(compiled: Compiled) -> None:
    """As vLLM's user guide for Neuron has it; greedy requests stay greedy, and other parameters need all logits."""
    from contextlib import closing

    from llmc.runtime.engine.sampling.params import SamplingParams
    from llmc.runtime.llm import BundleLLM

    with closing(BundleLLM(compiled.path, threads=1)) as llm:
        engine = llm.core
        assert engine.executor.capabilities.most_top_k == 256
        for requested, found in ((-1, 256), (300, 256), (10, 10)):
            assert engine.sampler([1], SamplingParams(top_k=requested, temperature=0.8)).params.top_k == found
        assert engine.sampler([1], SamplingParams(top_k=-1, temperature=0)).greedy
