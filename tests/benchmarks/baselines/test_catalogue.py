"""Baselines by name, what they need, and how it is told that they are missing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from baselines import catalogue
from baselines.catalogue import APART, BASELINES, PINS, Requested, parse, requirement
from baselines.environment import installed, interpreter, require
from baselines.worker import ENGINES

from llmc.errors import DeviceError, InputError, UnknownNameError

ROOT = Path(__file__).parents[3]


def test_a_name_alone_is_the_first_variant() -> None:
    assert [one.label for one in parse("openvino-genai, llama-cpp:q4_1")] == ["openvino-genai int8", "llama-cpp q4_1"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("vllm", "unknown baseline 'vllm'; known: llama-cpp, onnxruntime-genai, openvino-genai, transformers"),
        ("llama-cpp:q2", "unknown variant of llama-cpp 'q2'; known: as-is, q4_0, q4_1, q4_k_m, q8_0"),
    ],
)
def test_unknown_names_list_the_known_ones(text: str, said: str) -> None:
    with pytest.raises(UnknownNameError, match=re.escape(said)):
        parse(text)


def test_a_baseline_named_twice_is_refused() -> None:
    with pytest.raises(InputError, match="'llama-cpp:q8_0' is named twice"):
        parse("llama-cpp,llama-cpp:q8_0")


def test_every_baseline_has_its_engine_and_pins() -> None:
    for baseline in BASELINES.values():
        assert (ENGINES / f"{baseline.engine}.py").is_file()
        for name in baseline.variants:
            assert set(Requested(baseline, name).distributions) <= {*PINS, *APART}


def test_the_requirements_of_the_benchmarks_have_the_same_pins() -> None:
    lines = (ROOT / "benchmarks" / "requirements-baselines.txt").read_text().splitlines()
    pinned = dict(re.sub(r"\[.*?\]", "", line).split("==") for line in lines if "==" in line and line[0] != "#")
    assert {name: pinned[name] for name in PINS} == PINS


def test_no_engine_is_named_as_what_it_imports() -> None:
    imported = {
        match for file in ENGINES.glob("*.py") for match in re.findall(r'import_module\("(\w+)', file.read_text())
    }
    assert imported and not imported & {file.stem for file in ENGINES.glob("*.py")}


def test_a_missing_baseline_is_said_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalogue.PINS, "no-such-engine", "1.2")
    baseline = catalogue.Baseline(
        "none", "genai", ("no-such-engine", "numpy"), {"int8": catalogue.Variant("huggingface", 8)}
    )
    monkeypatch.setitem(catalogue.PINS, "numpy", "2")
    with pytest.raises(DeviceError) as caught:
        require([Requested(baseline, "int8")], sys.executable)
    assert str(caught.value) == (
        f"no-such-engine not installed in {sys.executable}; install with: {sys.executable} -m pip install "
        "'no-such-engine==1.2', or name the Python of an environment that has it: --baseline-python"
    )


def test_versions_are_those_of_the_other_python() -> None:
    import numpy as np

    assert installed(sys.executable, ["numpy", "no-such-engine"]) == {"numpy": np.__version__}
    assert requirement("llama-cpp-python") == f"llama-cpp-python=={PINS['llama-cpp-python']}"


def test_an_environments_folder_stands_for_its_python(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    assert interpreter(tmp_path) == str(tmp_path / "bin" / "python")
    assert interpreter(None) == sys.executable


def test_a_python_that_is_not_there_or_does_not_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no Python there"):
        interpreter(tmp_path / "nowhere")
    (tmp_path / "python").write_text("not a program")
    with pytest.raises(DeviceError, match="cannot be run"):
        installed(str(tmp_path / "python"), ["numpy"])
