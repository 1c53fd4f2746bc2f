"""Compiled models without weights: the same bytes each time, one weights file, opened by another process."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import openvino as ov
import pytest

from llmc.compiler.targets.openvino.finish import FinishedWeights, weightless
from llmc.compiler.targets.openvino.formats import Int8, WeightFormat, format_for
from llmc.errors import ArtifactError, CompileError
from llmc.runtime.executors.openvino.blobs import CpuBlob, open_blob
from llmc.runtime.executors.openvino.device import open_core
from tests.compiler.targets.openvino.static_models import EXACT, Format, with_weights
from tests.tiers import default_cases

SIZES = ((2, 1, 16), (1, 8, 0))
FORMATS: dict[str, Format] = {
    "f32": WeightFormat, "int8": Int8, "int8 groups": partial(Int8, group=32), "bf16": format_for("none", "bf16"),
}  # fmt: skip


class Exported:
    """Models of one weight format, exported over one weights file."""

    def __init__(self, folder: Path, weights: Format) -> None:
        self.folder = folder
        self.models = [with_weights("llama", sizes, folder, weights) for sizes in SIZES]
        out = io.BytesIO()
        self.file = FinishedWeights(out)
        self.sizes = []
        self.blobs = []
        for model in self.models:
            self.blobs.append(weightless(model, EXACT, self.file))
            self.sizes.append(len(out.getvalue()))
        self.weights = folder / "weights"
        self.weights.write_bytes(out.getvalue())

    def open(self, data: bytes) -> ov.CompiledModel:
        return open_blob(data, self.weights, EXACT, "bundle: decode", "llmc compile model")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return Exported(tmp_path_factory.mktemp("blobs"), Int8)


def logits(compiled: ov.CompiledModel) -> np.ndarray:
    random = np.random.default_rng(0)
    given = {
        port.any_name: random.standard_normal(tuple(port.shape)).astype(np.float32)
        if port.element_type == ov.Type.f32 else np.full(tuple(port.shape), 1 + ("past" in port.any_name), np.int32)
        for port in compiled.inputs
    }  # fmt: skip
    return np.array(compiled(given)["logits"])


@default_cases(1)
@pytest.mark.parametrize("weights", FORMATS)
def test_a_blob_computes_what_its_model_does(weights: str, tmp_path: Path) -> None:
    built = Exported(tmp_path, FORMATS[weights])
    for model, blob in zip(built.models, built.blobs, strict=True):
        np.testing.assert_array_equal(logits(built.open(blob)), logits(open_core().compile_model(model, "CPU", EXACT)))


def test_models_of_several_shapes_share_one_weights_file(exported: Exported) -> None:
    first, both = exported.sizes
    assert both - first < 0.02 * first
    assert all(CpuBlob.parse(blob).constants.nbytes == 1 for blob in exported.blobs)


def test_equal_models_give_equal_bytes_whatever_the_process_built_before(exported: Exported) -> None:
    assert weightless(exported.models[0], EXACT, FinishedWeights(io.BytesIO())) == exported.blobs[0]


def test_no_path_is_in_a_blob_and_the_weights_may_lie_elsewhere(exported: Exported, tmp_path: Path) -> None:
    blob = exported.blobs[0]
    assert str(exported.folder).encode() not in blob
    moved = tmp_path / "other" / "weights"
    moved.parent.mkdir()
    moved.write_bytes(exported.weights.read_bytes())
    there = open_blob(blob, moved, EXACT, "s", "again")
    np.testing.assert_array_equal(logits(there), logits(exported.open(blob)))


def test_a_process_without_the_compiler_and_without_torch_opens_a_blob(exported: Exported, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(exported.blobs[1])
    code = (
        "import sys, json; from pathlib import Path\n"
        "from llmc.runtime.executors.openvino.blobs import open_blob\n"
        "opened = open_blob(Path(sys.argv[1]).read_bytes(), Path(sys.argv[2]), {}, 's', 'again')\n"
        "print(json.dumps([len(opened.inputs), [m for m in ('torch', 'onnx', 'llmc.compiler') if m in sys.modules]]))\n"
    )
    requested = [sys.executable, "-c", code, str(tmp_path / "blob"), str(exported.weights)]
    done = subprocess.run(requested, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == [3, []]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: m.replace("ov=", "ov=1."),
            r"compiled with OpenVINO 1\.\S+, this host has \S+; install openvino==1\.",
        ),
        (lambda m: m.replace("isa=", "isa=Z"), "it was compiled for Z.*, but OpenVINO chooses .* on this one"),
        (lambda m: m.replace("meta=1.0", "meta=9.0"), "cannot open it here: current: meta=1.0"),
    ],
)
def test_a_blob_of_another_openvino_or_cpu_is_refused_and_both_are_named(
    exported: Exported, change: Callable[[str], str], message: str
) -> None:
    blob = CpuBlob.parse(exported.blobs[0])
    other = replace(blob, metadata=change(blob.metadata)).with_model(blob.model)
    with pytest.raises(ArtifactError, match=message) as refused:
        exported.open(other)
    assert "bundle: decode" in str(refused.value)
    assert "compile again: llmc compile model" in str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:10], "it ends within its header"),
        (lambda b: b[: len(b) // 2], "and its header says"),
        (lambda b: b[:-1], "and its header says"),
        (lambda b: b"<net" + b, "it does not begin as OpenVINO's compiled models do"),
        (lambda b: b[:-50] + b"?" * 50, "cannot open it here"),
    ],
)
def test_what_is_no_blob_is_refused(exported: Exported, change: Callable[[bytes], bytes], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        exported.open(change(exported.blobs[0]))


def test_a_weights_file_that_is_too_short_is_refused(exported: Exported, tmp_path: Path) -> None:
    short = tmp_path / "weights"
    short.write_bytes(b"abc")
    with pytest.raises(ArtifactError, match="cannot open it here"):
        open_blob(exported.blobs[0], short, EXACT, "s", "again")


def test_a_model_that_openvino_cannot_compile_is_an_error_of_compiling(exported: Exported) -> None:
    with pytest.raises(CompileError, match="OpenVINO cannot compile the model"):
        weightless(exported.models[0], {"NO_SUCH_PROPERTY": "1"}, FinishedWeights(io.BytesIO()))
