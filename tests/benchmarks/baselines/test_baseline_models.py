"""Forms of a checkpoint for baselines: made once by their tools, whole or not at all."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from baselines import baseline_models
from baselines.baseline_models import BaselineModels, weights_read
from baselines.catalogue import parse
from baselines.contenders import checkpoint_of, nominal_bits
from baselines.forms.openvino_ir import quantised

from llmc.compiler.checkpoint import open_checkpoint
from llmc.errors import CheckpointError, CompileError, InputError
from llmc.runtime.bundle import Bundle
from llmc.testing.toy import write_toy
from tests.compiler import tiny
from tests.compiler.checkpoint.quantised import packers
from tests.compiler.checkpoint.writers import write_blocks
from tests.toy import Toy

COPY = "import shutil, sys; shutil.copy(sys.argv[1], sys.argv[2]); open(sys.argv[2], 'a').write(' as ' + sys.argv[3])"


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tools that only copy, in place of the baselines'."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "quantise_gguf.py").write_text(COPY)
    monkeypatch.setattr(baseline_models, "SCRIPTS", folder)
    return folder


@pytest.fixture
def models(tmp_path: Path) -> tuple[BaselineModels, list[str]]:
    built: list[str] = []
    checkpoint = open_checkpoint(tiny.write_model(tmp_path / "model", "llama"))
    return BaselineModels(checkpoint, tmp_path / "baselines", sys.executable, built.append), built


def test_a_form_is_built_once_and_what_it_is_built_of_too(
    models: tuple[BaselineModels, list[str]], scripts: Path, tmp_path: Path
) -> None:
    forms, built = models
    first = forms.get("gguf-q8_0")
    assert first == tmp_path / "baselines" / "gguf-q8_0.gguf"
    assert first.read_bytes().startswith(b"GGUF") and first.read_bytes().endswith(b" as Q8_0")
    assert forms.all(["gguf-q8_0", "gguf-q4_1"]) == {"gguf-q8_0": first, "gguf-q4_1": first.with_name("gguf-q4_1.gguf")}
    assert built == ["gguf-q8_0.gguf", "gguf-f16.gguf", "gguf-q4_1.gguf"] or built == [
        "gguf-f16.gguf", "gguf-q8_0.gguf", "gguf-q4_1.gguf",
    ]  # fmt: skip


def test_a_gguf_file_is_itself_whatever_its_types_are(models: tuple[BaselineModels, list[str]], tmp_path: Path) -> None:
    write_blocks(tmp_path / "m.gguf", {"v_proj": "Q6_K", "": "Q4_K"})
    form = parse("llama-cpp:as-is")[0].variant.form
    file = BaselineModels(
        open_checkpoint(tmp_path / "m.gguf"), tmp_path / "baselines", sys.executable, lambda form: None
    )
    assert file.get(form) == tmp_path / "m.gguf"
    with pytest.raises(CheckpointError, match="model: no GGUF file; compare with llama-cpp:q8_0"):
        models[0].get(form)


def test_the_documented_tool_of_openvino_makes_the_model_that_cross_checks_ours(
    models: tuple[BaselineModels, list[str]], tmp_path: Path
) -> None:
    """optimum-cli beside the baselines' Python; here a script that writes down what it was asked for."""
    forms, built = models
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "bin" / "optimum-cli").write_text(
        "import pathlib, sys\nout = pathlib.Path(sys.argv[-1])\nout.mkdir()\n"
        "(out / 'asked').write_text(str(sys.argv[1:-1]))\n"
    )
    forms.python = str(tmp_path / "bin" / "python")
    requested = parse("openvino-genai:int8-optimum")[0]
    folder = forms.get(requested.variant.form)
    said = ast.literal_eval((folder / "asked").read_text())
    assert said[:2] == ["export", "openvino"] and said[-2:] == ["--weight-format", "int8"]
    assert said[said.index("--model") + 1] == str(tmp_path / "model")
    assert requested.variant.options == parse("openvino-genai:int8")[0].variant.options and built == ["optimum-int8"]


def test_a_folder_for_transformers_is_its_own_form(models: tuple[BaselineModels, list[str]], tmp_path: Path) -> None:
    forms, built = models
    assert forms.get("huggingface") == tmp_path / "model"
    assert built == []


def test_a_folder_that_stores_quantized_weights_is_written_in_floats(tmp_path: Path) -> None:
    values = packers.write(tmp_path / "model", *packers.CASES["awq groups of 32"])
    forms = BaselineModels(
        open_checkpoint(tmp_path / "model"), tmp_path / "baselines", sys.executable, lambda built: None
    )
    folder = forms.get("huggingface")
    assert folder != tmp_path / "model"
    written = open_checkpoint(folder)
    assert "quantization_config" not in (folder / "config.json").read_text()
    assert all(np.array_equal(written.tensor(name), held) for name, held in values.items())


def test_a_tool_that_fails_leaves_nothing_and_its_last_words(
    models: tuple[BaselineModels, list[str]], scripts: Path, tmp_path: Path
) -> None:
    forms, _ = models
    (scripts / "quantise_gguf.py").write_text("raise SystemExit('out of\\nluck')")
    with pytest.raises(
        CompileError, match=r"gguf-q8_0\.gguf of .*model could not be made \(exit code 1\): …out of luck"
    ):
        forms.get("gguf-q8_0")
    assert [path.name for path in (tmp_path / "baselines").iterdir()] == ["gguf-f16.gguf"]


def test_a_checkpoint_without_that_form_says_so(tmp_path: Path) -> None:
    forms = BaselineModels(open_checkpoint(write_toy(tmp_path / "toy")), tmp_path / "baselines", sys.executable, print)
    with pytest.raises(CheckpointError, match="no GGUF file is written of architecture 'toy'"):
        forms.get("openvino-int8")


def test_a_tied_head_is_read_once_and_an_untied_embedding_not(tmp_path: Path) -> None:
    hidden, vocabulary = 8, 257
    untied = open_checkpoint(write_toy(tmp_path / "untied"))
    assert weights_read(untied) == hidden * vocabulary
    tied = open_checkpoint(write_toy(tmp_path / "tied", tie_word_embeddings=True))
    assert weights_read(tied) == hidden * vocabulary


def test_the_checkpoint_of_a_bundle_has_to_be_the_one_it_was_compiled_from(tmp_path: Path) -> None:
    toy = Toy.make(tmp_path)
    toy.compile()
    bundle = Bundle.open(toy.bundle)
    assert checkpoint_of(bundle, None, toy.store).path == toy.model
    other = write_toy(tmp_path / "other", seed=1)
    with pytest.raises(InputError, match="a comparison is of the same weights"):
        checkpoint_of(bundle, str(other), toy.store)
    toy.model.rename(tmp_path / "gone")
    with pytest.raises(InputError, match="is not here: name it with --model"):
        checkpoint_of(bundle, None, toy.store)
    assert checkpoint_of(bundle, str(tmp_path / "gone"), toy.store).path == tmp_path / "gone"


def test_bits_follow_how_a_bundle_was_quantised(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_toy(tmp_path / "toy"))

    def bits(**options: str) -> float | None:
        return nominal_bits(SimpleNamespace(options=options), checkpoint)  # type: ignore[arg-type]

    assert bits(quantize="int8", dtype="f32") == 8
    assert bits(quantize="int4") == 4
    assert bits(quantize="none", dtype="f32") == 32
    assert bits(quantize="keep") is None, "nothing is quantised in this checkpoint"


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_channel_of_openvinos_int8_is_within_half_a_step(symmetric: bool) -> None:
    matrix = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    matrix[3] = 0
    quantized, scale, zero = quantised(matrix, symmetric)
    assert quantized.dtype == (np.int8 if symmetric else np.uint8)
    value = (quantized.astype(np.float32) - (0 if zero is None else zero)) * scale.astype(np.float32)
    assert np.abs(value - matrix).max() <= 0.55 * scale.astype(np.float32).max() + 128 * 5e-4 * scale.max()
    assert (value[3] == 0).all()
