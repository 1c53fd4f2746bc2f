"""`llmc compile --emit`: programs as text, and nothing compiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.artifacts.store.store import Store
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compilation import Compilation
from llmc.errors import InputError
from llmc.settings import Settings
from llmc.testing.toy import toy_plan
from tests.cli.helpers import Llmc
from tests.compiler import tiny
from tests.compiler.encoders_tiny import write_encoder
from tests.tiers import full

pytestmark = full

LIMITS = ("--max-model-len", "16", "--max-num-seqs", "1", "--block-size", "8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.mark.parametrize(
    ("device", "names", "program", "lowered"),
    [
        ("onnxruntime", ["step"], "linear(", "opset_import"),
        ("openvino", ["step"], "linear(", "PagedAttentionExtension"),
        ("openvino:NPU", ["step"], "linear(", "MatMul"),
        ("hpu", ["program_first", "program_cached"], "linear.default(", "linear.default("),
        ("xla", ["program_first", "program_cached"], "linear.default(", "stablehlo.dot_general"),
    ],
)
def test_each_device_shows_what_it_traced_and_what_it_lowered(
    device: str, names: list[str], program: str, lowered: str, model: Path, store: Path, llmc: Llmc
) -> None:
    requested = ("compile", str(model), "--device", device, *LIMITS, "--cache-dir", str(store), "--json")
    traced = llmc(*requested, "--emit", "program").json
    assert [p["name"] for p in traced] == names
    assert all(program in p["text"] for p in traced)
    forms = llmc(*requested, "--emit", "lowered").json
    assert forms
    assert all(lowered in p["text"] for p in forms)
    assert not Store(store).entries("executable"), "nothing is compiled"


@pytest.mark.parametrize(
    ("device", "program", "names", "lowered"),
    [
        ("onnxruntime", "linear(", ["model"], "opset_import"),
        ("openvino", "linear(", ["model"], "<net "),
        ("xla", "linear.default(", ["encode batch=1 query=16", "encode batch=1 query=20"], "stablehlo.dot_general"),
    ],
)
def test_models_that_embed_are_shown_too(
    device: str, program: str, names: list[str], lowered: str, tmp_path: Path, store: Path, llmc: Llmc
) -> None:
    model = write_encoder(tmp_path / "bert", "bert")
    limits = ("--max-model-len", "20", "--max-num-seqs", "1")
    requested = ("compile", str(model), "--device", device, *limits, "--cache-dir", str(store), "--json", "--emit")
    (traced,) = llmc(*requested, "program").json
    assert traced["name"] == "encode"
    assert program in traced["text"]
    forms = llmc(*requested, "lowered").json
    assert [one["name"] for one in forms] == names
    assert all(lowered in one["text"] for one in forms)
    assert not Store(store).entries("executable"), "nothing is compiled"


def test_programs_go_to_a_file_and_a_compile_finds_them_in_the_store(tmp_path: Path, toy: Path, llmc: Llmc) -> None:
    file = tmp_path / "toy.txt"
    args = ("compile", str(toy), "--device", "fake", *LIMITS, "--cache-dir", str(tmp_path / "store"))
    assert llmc(*args, "--emit", "program", "-o", str(file)).code == 0
    name, text = file.read_text().splitlines()
    assert name == "// toy"
    assert json.loads(text).keys() == {"decay", "positions"}
    (entry,) = Store(tmp_path / "store").entries("trace")
    assert llmc(*args, "-o", str(tmp_path / "bundle")).code == 0
    assert [e.key for e in Store(tmp_path / "store").entries("trace")] == [entry.key]


def test_an_unknown_phase_names_the_known_ones(tmp_path: Path, toy: Path) -> None:
    with pytest.raises(InputError, match="'hlo' is unknown; choose program, lowered or key"):
        requested = Compilation.of(toy, CompileOptions(device="fake"), Store(tmp_path), Settings(), plan=toy_plan())
        list(requested.programs("hlo", print))
