"""The source of every module that shapes a result is in the key of that result, and that of no other."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import llmc
from llmc.artifacts.key import Key
from llmc.compiler import code
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.executors.base import executable_key
from llmc.compiler.targets import devices, open_target
from llmc.compiler.targets.base import Lowered, Shape, Target
from tests.compiler.keyed import DEVICES, Compiled, changed
from tests.tiers import default_cases

SOURCES = Path(llmc.__file__).parent


def built_by(*kinds: str, devices: tuple[str, ...] = DEVICES) -> dict[str, set[str]]:
    """Kinds of key on each of the devices."""
    return {device: set(kinds) for device in devices}


CODE = {
    "compiler/targets/fake.py": {"fake": {"trace", "weights", "executable"}},
    "compiler/targets/onnxruntime/target.py": {"cpu": {"lower", "pack", "executable"}},
    "compiler/targets/hpu/target.py": {"hpu": {"executable"}},
    "compiler/text.py": built_by("tokenizer"),
    "compiler/weights/stage.py": {
        "cpu": {"lower", "weights", "pack", "executable"}, "hpu": {"weights", "executable"},
    },
    "compiler/frontend/attention.py": built_by("trace", devices=("cpu", "hpu")),
    "compiler/frontend/repeat.py": built_by("trace", devices=("cpu", "hpu")),
    "compiler/frontend/traceable.py": built_by("trace", devices=("cpu", "hpu")),
    "compiler/frontend/skeleton.py": built_by("trace", "reference", devices=("cpu", "hpu")),
    "compiler/program/import_fx.py": {"cpu": {"trace"}},
    "compiler/targets/onnxruntime/to_onnx.py": {"cpu": {"lower"}},
    "compiler/targets/onnxruntime/onnx_model.py": {"cpu": {"lower", "pack", "executable"}},
    "compiler/targets/onnxruntime/formats.py": {"cpu": {"lower"}},
    "compiler/weights/nbits.py": {"cpu": {"lower", "weights", "pack"}, "hpu": {"weights"}},
    "compiler/targets/onnxruntime/packing.py": {"cpu": {"pack"}},
    "compiler/program/to_export.py": {"hpu": {"trace", "executable"}},
    "compiler/weights/recipes.py": {"cpu": {"lower", "weights", "pack"}, "hpu": {"weights"}},
    "compiler/checkpoint/huggingface.py": built_by("weights", "tokenizer", "reference"),
    "compiler/verification/parts.py": built_by("reference", "verify"),
    "compiler/verification/probes.py": built_by("reference", "verify"),
    "compiler/verification/texts.py": built_by("reference", "verify"),
    "compiler/verification/accuracy.py": built_by("verify"),
    "compiler/verification/verify.py": built_by("verify"),
    "compiler/verification/toy_reference.py": {"fake": {"reference"}},
    "runtime/executors/fake/executor.py": {"fake": {"verify"}},
    "runtime/executors/onnxruntime/session.py": {"cpu": {"pack", "executable", "verify"}},
    "runtime/executors/torch/executor.py": {"hpu": {"verify"}},
    "runtime/engine/sampling/params.py": built_by("verify"),
    "runtime/host.py": {
        "fake": {"reference", "verify"}, "cpu": {"lower", "pack", "executable", "reference", "verify"},
        "hpu": {"reference", "verify"},
    },
    "runtime/engine/batched_core.py": built_by("verify"),
    "runtime/text/tokenizer.py": built_by("tokenizer", "reference", "verify"),
    "buckets/lookup.py": built_by("verify"),
    "errors.py": {},
    "cli/compile.py": {},
    "buckets/report/plan_page.py": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package's sources, to change one of."""
    return shutil.copytree(SOURCES, tmp_path_factory.mktemp("code") / "llmc", ignore=shutil.ignore_patterns("*.pyc"))


@pytest.fixture
def elsewhere(copied: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Digests of code are taken from the copy."""
    monkeypatch.setattr(code, "ROOT", copied)
    code.forget()
    yield copied
    code.forget()


def edit(folder: Path, name: str) -> bytes:
    """Add a statement to a source, and return what it was."""
    source = (folder / name).read_bytes()
    (folder / name).write_bytes(source + b"\nEDITED = 1\n")
    code.forget()
    return source


@default_cases("fake")
@pytest.mark.parametrize("device", DEVICES)
def test_a_change_of_code_changes_the_keys_of_what_it_makes(device: str, compiled: Compiled, elsewhere: Path) -> None:
    keyed, base = compiled(device)
    assert changed(base, keyed.ask()) == set(), "the same code elsewhere is the same code"
    for name, kinds in CODE.items():
        source = edit(elsewhere, name)
        assert changed(base, keyed.ask()) == {f"{kind}:code" for kind in kinds.get(device, set())}, name
        (elsewhere / name).write_bytes(source)
        code.forget()


# Executables of every target

INHERITED = ("compiler/targets/base.py",)
TARGETS: Mapping[str, tuple[str, ...]] = {
    "fake": ("compiler/targets/fake.py", "runtime/executors/fake/device.py"),
    "cpu": (
        "compiler/targets/onnxruntime/target.py", "compiler/targets/onnxruntime/onnx_model.py",
        "runtime/executors/onnxruntime/session.py",
        "runtime/host.py",
    ),
    "onnxruntime": ("compiler/targets/onnxruntime/target.py", "compiler/targets/onnxruntime/onnx_model.py"),
    "openvino": ("compiler/targets/openvino/target.py", "compiler/targets/openvino/base_target.py"),
    "openvino:NPU": (
        "compiler/targets/openvino/static_target.py", "compiler/targets/openvino/base_target.py",
        "compiler/targets/openvino/formats.py",
        "compiler/weights/recipes.py",
    ),
    "hpu": (
        "compiler/targets/hpu/target.py", "compiler/targets/programs.py", "compiler/program/to_export.py",
        "runtime/portable_program.py", "compiler/weights/stage.py",
    ),
    "inductor": ("compiler/targets/inductor/target.py", "compiler/targets/programs.py"),
    "lpu": (
        "compiler/targets/lpu.py", "compiler/targets/programs.py", "compiler/program/to_export.py",
        "runtime/executors/lpu/hyperdex.py",
    ),
    "xla": (
        "compiler/targets/xla/target.py",
        "compiler/targets/xla/build.py", "compiler/targets/xla/step.py",
        "compiler/targets/xla/operators.py",
        "compiler/targets/xla/torch_xla.py", "compiler/targets/xla/torch_xla_worker.py",
        "compiler/program/to_export.py",
        "runtime/executors/xla/envelope.py", "runtime/executors/xla/client.py",
    ),
    "neuron:trn2": (
        "compiler/targets/neuron/target.py", "compiler/targets/neuron/lowering.py",
        "compiler/targets/neuron/neuronx_cc.py",
        "compiler/targets/xla/target.py", "compiler/targets/xla/build.py", "compiler/targets/xla/step.py",
        "compiler/targets/xla/hlo_ids.py", "compiler/targets/xla/sharding.py",
        "runtime/executors/neuron/files.py",
    ),
    "cuda:h100": (
        "compiler/targets/cuda/target.py", "compiler/targets/cuda/gpus.py",
        "compiler/targets/xla/described.py", "compiler/targets/xla/target.py", "compiler/targets/xla/build.py",
        "compiler/targets/xla/scan_layers.py", "compiler/targets/xla/sharding.py",
        "runtime/executors/xla/client.py",
    ),
    "tpu:v5e-2x2": (
        "compiler/targets/xla/tpu.py", "compiler/targets/xla/described.py", "compiler/targets/xla/target.py",
        "compiler/targets/xla/build.py",
        "compiler/targets/xla/scan_layers.py", "compiler/targets/xla/sharding.py",
        "compiler/targets/xla/torch_xla_worker.py",
        "runtime/executors/xla/client.py",
    ),
}  # fmt: skip
"""Modules that shape executables of each device, its own, what it inherits and what it calls."""
UNRELATED = (
    "cli/compile.py", "cli/main.py", "server/app.py", "server/dashboard.html", "buckets/report/plan_page.py",
    "bench/bucket_times.py", "errors.py", "api/__init__.py", "compiler/pipeline/compile.py",
    "compiler/checkpoint/gguf.py",
)  # fmt: skip


def key_of(target: Target, options: CompileOptions) -> Key:
    """The key of an executable of whatever was prepared."""
    return executable_key(target, Lowered({}, {}, {}), Shape("decode", 1, 1, 8), options)


def test_every_target_is_among_those_whose_code_is_changed_here() -> None:
    assert {device.partition(":")[0] for device in TARGETS} == set(devices())


@pytest.mark.parametrize("device", TARGETS)
def test_an_executable_is_keyed_by_all_code_that_its_target_has_inherits_or_calls(device: str, elsewhere: Path) -> None:
    target = open_target(device)
    options = CompileOptions(device, "none", "f32")
    base = key_of(target, options)
    for name in (*TARGETS[device], *INHERITED, *UNRELATED):
        source = edit(elsewhere, name)
        found = [difference.name for difference in key_of(target, options).explain(base)]
        assert found == ([] if name in UNRELATED else ["code"]), name
        (elsewhere / name).write_bytes(source)
        code.forget()
    assert key_of(target, options) == base


def test_the_library_of_kernels_is_keyed_by_its_c_sources(elsewhere: Path) -> None:
    from llmc.compiler.targets.onnxruntime.kernels.build import build

    base = code.code_digest(build)
    for name in ("linear.c", "panels.h"):
        source = edit(elsewhere, f"compiler/targets/onnxruntime/kernels/source/{name}")
        assert code.code_digest(build) != base, name
        (elsewhere / "compiler/targets/onnxruntime/kernels/source" / name).write_bytes(source)
        code.forget()
