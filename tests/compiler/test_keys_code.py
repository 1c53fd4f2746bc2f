"""The source of every module that shapes a result is in the key of that result, and that of no other."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import llmc
from llmc.compiler import stages, text_files, weight_stage, weightless
from llmc.compiler.openvino import base_target, static_target
from llmc.compiler.targets import cpu, fake, openvino
from llmc.compiler.verification import stage as verification
from tests.compiler.keyed import DEVICES, Compiled, changed

SOURCES = Path(llmc.__file__).parent


def made_by(*kinds: str, devices: tuple[str, ...] = DEVICES) -> dict[str, set[str]]:
    """Kinds of key on each of the devices."""
    return {device: set(kinds) for device in devices}


CODE = {
    "compiler/targets/fake.py": {"fake": {"weights", "executable"}},
    "compiler/targets/cpu.py": {"cpu": {"lower", "pack", "executable"}},
    "compiler/targets/hpu.py": {"hpu": {"executable"}},
    "compiler/text_files.py": made_by("tokenizer"),
    "compiler/weight_stage.py": made_by("weights", devices=("cpu", "hpu")),
    "compiler/weightless.py": {"hpu": {"lower"}},
    "compiler/frontend/attention.py": made_by("lower", "reference", devices=("cpu", "hpu")),
    "compiler/lowering/import_fx.py": {"cpu": {"lower"}},
    "compiler/lowering/to_onnx.py": {"cpu": {"lower", "pack", "executable"}},
    "compiler/lowering/onnx_model.py": {"cpu": {"lower", "pack", "executable"}},
    "compiler/lowering/formats.py": {"cpu": {"lower", "pack", "executable"}},
    "compiler/lowering/nbits.py": {"cpu": {"lower", "weights", "pack", "executable"}},
    "compiler/lowering/packing.py": {"cpu": {"pack"}},
    "compiler/lowering/to_export.py": {"hpu": {"lower", "executable"}},
    "compiler/lowering/recipes.py": {"cpu": {"lower", "weights", "pack", "executable"}, "hpu": {"weights"}},
    "compiler/checkpoint/huggingface.py": made_by("weights", "tokenizer", "reference"),
    "compiler/verification/probes.py": made_by("reference", "verify"),
    "compiler/verification/texts.py": made_by("reference"),
    "compiler/verification/windows.py": made_by("reference", "verify"),
    "compiler/verification/accuracy.py": made_by("verify"),
    "compiler/verification/verify.py": made_by("verify"),
    "compiler/verification/toy_reference.py": {"fake": {"reference"}},
    "runtime/executors/fake.py": {**made_by("verify"), "fake": {"weights", "executable", "verify"}},
    "runtime/executors/ort_session.py": {
        **made_by("verify"), "cpu": {"pack", "executable", "verify"},
    },
    "runtime/engine.py": made_by("verify"),
    "runtime/tokenizer.py": made_by("tokenizer", "reference", "verify"),
    "buckets/lookup.py": made_by("verify"),
    "errors.py": {},
    "cli/compile.py": {},
    "buckets/plots/html.py": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package's sources, to change one of."""
    return shutil.copytree(SOURCES, tmp_path_factory.mktemp("code") / "llmc", ignore=shutil.ignore_patterns("*.pyc"))


@pytest.fixture
def elsewhere(copied: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Digests of code are taken from the copy."""

    def find(name: str) -> SimpleNamespace:
        found = find_spec(name)
        assert found is not None and found.origin is not None
        return SimpleNamespace(origin=str(copied / Path(found.origin).relative_to(SOURCES)))

    monkeypatch.setattr(stages, "find_spec", find)
    stages.code_digest.cache_clear()
    yield copied
    stages.code_digest.cache_clear()


@pytest.mark.parametrize("device", DEVICES)
def test_a_change_of_code_changes_the_keys_of_what_it_makes(device: str, compiled: Compiled, elsewhere: Path) -> None:
    keyed, base = compiled(device)
    assert changed(base, keyed.ask()) == set(), "the same code elsewhere is the same code"
    for name, kinds in CODE.items():
        source = (elsewhere / name).read_bytes()
        (elsewhere / name).write_bytes(source + b"\n")
        stages.code_digest.cache_clear()
        assert changed(base, keyed.ask()) == {f"{kind}:code" for kind in kinds.get(device, set())}, name
        (elsewhere / name).write_bytes(source)
        stages.code_digest.cache_clear()


SHAPES_NOTHING = (
    "llmc.errors", "llmc.settings", "llmc.artifacts", "llmc.compiler.stages", "llmc.compiler.options",
    "llmc.compiler.model_size", "llmc.compiler.targets.base", "llmc.compiler.verification.limits",
    "llmc.compiler.kernels.build", "llmc.runtime.host", "llmc.runtime.compilations",
    "llmc.runtime.executors.base", "llmc.runtime.executors", "llmc.buckets.bench_file", "llmc.buckets.bench_fit",
    "llmc.buckets.bench_surface", "llmc.buckets.fields", "llmc.buckets.files", "llmc.buckets.plan",
    "llmc.buckets.provenance",
)  # fmt: skip
"""Modules that no result depends on, or whose part in it (limits, features, options, kernels) is named otherwise."""


SEVERAL_STAGES = (
    "llmc.compiler.weightless", "llmc.compiler.targets", "llmc.compiler.openvino.base_target",
    "llmc.compiler.openvino.static_target",
)  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_the_code_of_a_key_leaves_out_no_module_that_its_code_imports(
    device: str, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (stages, cpu, weight_stage, weightless, text_files, fake, verification):
        monkeypatch.setattr(module, "code_digest", lambda *packages: " ".join(packages))
    keyed, _ = compiled(device)
    seen = set()
    for key in keyed.ask():
        named = tuple(str(key.components["code"]).split())
        if (key.kind, named) in seen:
            continue
        seen.add((key.kind, named))
        assert left_out(named) == set(), key.kind
    assert {kind for kind, _ in seen} == {key.kind for key in compiled(device)[1]}


@pytest.mark.parametrize("stage", ["paged", "static", "paged finished", "static finished"])
def test_the_code_of_models_of_openvino_leaves_out_no_module_that_it_imports(stage: str) -> None:
    named = {
        "paged": (*base_target.LOWERING_CODE, *openvino.LOWERING_CODE),
        "static": (*base_target.LOWERING_CODE, *static_target.LOWERING_CODE),
        "paged finished": (*base_target.FINISH_CODE, openvino.__name__),
        "static finished": (*base_target.FINISH_CODE, *static_target.FINISH_CODE),
    }
    assert left_out(named[stage]) == set()


def left_out(named: tuple[str, ...]) -> set[str]:
    """What modules import that are not named, though they shape the result, too."""
    return {
        f"{module} imports {imported}"
        for module in modules(named)
        for imported in imports(module)
        if not below(imported, (*named, *SHAPES_NOTHING, *_other_stages(module)))
    }


def _other_stages(module: str) -> tuple[str, ...]:
    """What a module that serves several stages imports for the others; each names it where it is used."""
    if below(module, SEVERAL_STAGES):
        return (
            "llmc.compiler.checkpoint.base", "llmc.compiler.frontend", "llmc.compiler.lowering",
            "llmc.compiler.openvino", "llmc.compiler.weight_stage", "llmc.compiler.xla.program", "llmc.runtime",
            *SEVERAL_STAGES,
        )  # fmt: skip
    if module.startswith("llmc.compiler.verification."):
        return ("llmc.compiler.verification", "llmc.compiler.checkpoint", "llmc.runtime")
    return ()


def below(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def modules(named: tuple[str, ...]) -> Iterator[str]:
    """The modules of packages, by name."""
    for name in named:
        path = origin(name)
        if path.name != "__init__.py":
            yield name
            continue
        for found in path.parent.rglob("*.py"):
            yield ".".join(
                [name, *(p for p in found.relative_to(path.parent).with_suffix("").parts if p != "__init__")]
            )


def imports(module: str) -> Iterator[str]:
    """Modules of llmc that a module imports, anywhere but for type checking."""
    tree = ast.parse(origin(module).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("llmc"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_module = (SOURCES.parent / inner.replace(".", "/")).with_suffix(".py").is_file()
                yield inner if is_module else node.module


def origin(module: str) -> Path:
    found = find_spec(module)
    assert found is not None and found.origin is not None
    return Path(found.origin)
