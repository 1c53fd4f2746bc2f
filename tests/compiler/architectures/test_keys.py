"""Families are imported by name, and are in the keys of what reads them all the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import llmc
from llmc.compiler import code
from llmc.compiler.architectures import FILES
from llmc.compiler.checkpoint.gguf import GgufCheckpoint
from llmc.compiler.checkpoint.huggingface import HuggingFaceCheckpoint
from llmc.compiler.frontend.trace import trace, trace_weightless
from llmc.compiler.pipeline.verification import probes_stage
from llmc.compiler.targets import open_target
from llmc.compiler.weights.stage import weights_stage
from tests.tiers import default_cases

READERS: dict[str, tuple[code.Maker, ...]] = {
    "weights of a GGUF file, whose rows are put in order": (weights_stage, GgufCheckpoint),
    "executables over several devices, which share weights": (open_target("tpu:v5e-2x2").compile,),
}
OTHERS: dict[str, tuple[code.Maker, ...]] = {
    "weights of safetensors": (weights_stage, HuggingFaceCheckpoint),
    "traces": (trace, trace_weightless),
    "references of safetensors": (probes_stage, HuggingFaceCheckpoint),
    "executables for a CPU": (open_target("onnxruntime").compile,),
}
ARCHITECTURES = {f"llmc.compiler.architectures.{file}" for file in FILES.values()}


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The families of a copy of the sources, which digests are taken from."""
    root = shutil.copytree(Path(llmc.__file__).parent, tmp_path / "llmc", ignore=shutil.ignore_patterns("*.pyc"))
    monkeypatch.setattr(code, "ROOT", root)
    code.forget()
    yield root / "compiler/architectures"
    code.forget()


@pytest.mark.parametrize("what", READERS)
def test_what_reads_a_family_is_keyed_by_the_files_of_all(what: str) -> None:
    assert set(code.closure(*READERS[what])) >= ARCHITECTURES


@pytest.mark.parametrize("what", OTHERS)
def test_what_reads_none_is_keyed_by_none(what: str) -> None:
    assert not set(code.closure(*OTHERS[what])) & ARCHITECTURES


@pytest.mark.parametrize("what", READERS)
def test_a_change_of_a_family_and_a_new_one_change_the_keys_of_what_reads_it(what: str, copied: Path) -> None:
    seen = [code.code_digest(*READERS[what])]
    for change in (copied / "qwen.py", copied / "shared/base.py"):
        change.write_text(change.read_text() + "EDITED = 1\n")
        code.forget()
        seen.append(code.code_digest(*READERS[what]))
    (copied / "new.py").write_text("FAMILIES = {}\n")
    code.forget()
    seen.append(code.code_digest(*READERS[what]))
    assert len(set(seen)) == 4
    assert "compiler.architectures.new=" in seen[-1]


@default_cases(2)
@pytest.mark.parametrize("what", OTHERS)
def test_a_new_family_leaves_all_else_as_it_is(what: str, copied: Path) -> None:
    before = code.code_digest(*OTHERS[what])
    (copied / "new.py").write_text("FAMILIES = {}\n")
    (copied / "llama.py").write_text("FAMILIES = {}\n")
    code.forget()
    assert code.code_digest(*OTHERS[what]) == before
