"""The command line as a whole: help, exit codes, errors in one line, and what it takes to start."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import llmc as package
from llmc.cli import main as main_module
from llmc.cli.main import run
from llmc.cli.root import COMMANDS, OTHER_NAMES
from llmc.compiler.targets import devices, other_names
from tests.artifacts.helpers import REPO, child, finish
from tests.cli.helpers import Llmc
from tests.devices import negated, use
from tests.tiers import default_cases

SMALL = ("--max-model-len", 32, "--max-num-seqs", 4)


# Help


def test_help_lists_every_command_and_says_what_it_does(llmc: Llmc) -> None:
    ran = llmc("--help")
    assert (ran.code, ran.err) == (0, "")
    for name, (_, summary) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", ran.out, re.M)


def test_without_a_command_the_help_is_shown(llmc: Llmc) -> None:
    ran = llmc()
    assert ran.code == 2
    assert "Commands:" in ran.out + ran.err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_in_its_help(llmc: Llmc, command: str) -> None:
    ran = llmc(command, "--help")
    assert (ran.code, ran.err) == (0, "")
    if command in ("cache", "traffic"):  # nouns with verbs, whose help their own tests look at
        return
    example = ran.out.split("Example:\n")[1]
    assert example.lstrip().startswith(f"llmc {command}")
    assert "--json" in ran.out or command in ("run", "chat", "report", "completion"), "all but what people read"


def test_the_version(llmc: Llmc) -> None:
    ran = llmc("--version")
    assert (ran.code, ran.out) == (0, f"{package.__version__}\n")


def test_python_m_llmc_is_the_same_command() -> None:
    built = subprocess.run(
        [sys.executable, "-m", "llmc", "--version"], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert (built.returncode, built.stdout, built.stderr) == (0, f"{package.__version__}\n", "")


def test_the_console_script_exits_with_the_code(llmc: Llmc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["llmc", "verify", "nowhere"])
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 5


# Usage


def test_an_unknown_command_lists_the_known_ones(llmc: Llmc) -> None:
    message = llmc("compiel", "model").failed(2)
    assert message == f"unknown command 'compiel'; known: {', '.join(sorted(COMMANDS))}; did you mean 'compile'?"


def test_what_is_called_otherwise_elsewhere_is_reported_its_name(llmc: Llmc) -> None:
    for said, name in {"build": "compile", "infer": "run", "ask": "run", "start": "serve"}.items():
        assert llmc(said, "model").failed(2).endswith(f"did you mean {name!r}?")
    assert set(OTHER_NAMES.values()) <= set(COMMANDS) and not set(OTHER_NAMES) & set(COMMANDS)
    called = other_names()
    assert set(called.values()) <= set(devices()) and not set(called) & set(devices())
    for name, device in {"gaudi": "hpu", "GPU": "cuda", "trainium": "neuron", "opnvino": "openvino"}.items():
        assert llmc("plan", "model", "--device", name).failed(2).endswith(f"did you mean {device!r}?")
    assert "mean" not in llmc("plan", "model", "--device", "abacus").failed(2)


@pytest.mark.parametrize(
    "command", ["compile nowhere", "plan nowhere", "run nowhere hi", "chat nowhere", "serve nowhere", "deploy docker"]
)
def test_a_device_that_there_is_not_is_reported_before_all_else(llmc: Llmc, command: str) -> None:
    known = ", ".join(name for name in devices() if name != "fake")
    for given in (["--device", "gaudi"], ["--device=gaudi:x"]):
        said = llmc(*command.split(), *given).failed(2)
        assert said == f"unknown device {given[-1].removeprefix('--device=')!r}; known: {known}; did you mean 'hpu'?"


@pytest.mark.parametrize(
    ("command", "near"),
    [
        ("compile x --devise cpu", "--device"),
        ("serve x --max-queued-request 4", "--max-queued-requests"),
        ("cache lst", "'ls'"),
        ("traffic shw", "'show'"),
        ("plan evalute plan.json", "did you mean 'evaluate'?"),
        ("compile {toy} --quantize int9", "did you mean 'int8'?"),
        ("compile {toy} --executor rai", "did you mean 'ray'?"),
        ("serve x --warm-up opne", "did you mean 'open'?"),
        ("plan {toy} --strategy linaer", "did you mean 'linear'?"),
        ("completion zhs", "did you mean 'zsh'?"),
    ],
)
def test_what_is_misspelt_is_reported_the_near_name(llmc: Llmc, toy: Path, command: str, near: str) -> None:
    ran = llmc(*(word.format(toy=toy) for word in command.split()))
    assert ran.code == 2 and near in ran.err, ran


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compile", "model", "--devise", "cpu"], "No such option: --devise"),
        (["compile", "model", "--jobs", "many"], "--jobs"),
        (["generate"], "Missing argument 'BUNDLE|MODEL'"),
        (["generate", "bundle", "--max-tokens", "few"], "--max-tokens"),
        (["verify", "bundle", "other"], "unexpected extra argument"),
    ],
)
def test_arguments_that_cannot_be_read_are_usage_errors(llmc: Llmc, arguments: list[str], words: str) -> None:
    ran = llmc(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert f"llmc {arguments[0]} --help" in ran.err
    assert words in ran.err and "Traceback" not in ran.err


# Exit codes: one clear line each


def failure(llmc: Llmc, toy: Path, patch: pytest.MonkeyPatch, code: int) -> list[Any]:
    """Arguments that end with `code`."""
    compile_ = ["compile", toy, "--device", "fake", *SMALL, "-o", "b", "-q"]
    match code:
        case 1:
            return ["compile", "nowhere", "--device", "fake", "-q"]
        case 2:
            return ["compile", toy, "--device", "gpu", "-q"]
        case 3:
            use(patch, state="portable")
            return [*compile_, "--require-native"]
        case 4:
            use(patch, replay=negated)
            return compile_
        case _:
            return ["generate", "nowhere", "--prompt", "x", "-q"]


MESSAGES = {
    1: "nowhere: no such file or folder; MODEL is a Hugging Face folder, a .gguf file, a hub name",
    2: "unknown device 'gpu'; known: cpu, cuda, hpu",
    3: "--require-native: executables for fake are only portable on this host",
    4: "compiled graphs disagree with the reference model",
    5: "nowhere: no such file or folder; MODEL is a Hugging Face folder",
}


@pytest.mark.parametrize("code", MESSAGES)
def test_failures_have_a_code_and_say_one_line(
    llmc: Llmc, toy: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    assert llmc(*failure(llmc, toy, monkeypatch, code)).failed(code).startswith(MESSAGES[code])


@pytest.mark.parametrize("code", MESSAGES)
def test_with_v_the_line_is_followed_by_the_traceback(
    llmc: Llmc, toy: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    arguments = failure(llmc, toy, monkeypatch, code)
    arguments[-1 if arguments[-1] == "-q" else -2] = "-v"
    ran = llmc(*arguments)
    assert ran.code == code
    _, message, rest = ran.err.partition("llmc: error: ")
    assert message and rest.startswith(MESSAGES[code])
    assert "\nTraceback (most recent call last):\n" in rest


def test_what_nobody_expected_is_one_line_too(llmc: Llmc, monkeypatch: pytest.MonkeyPatch) -> None:
    def survey() -> None:
        raise ZeroDivisionError("no devices per host")

    monkeypatch.setattr("llmc.compiler.pipeline.survey.survey", survey)
    message = llmc("devices").failed(1)
    assert message == "unexpected ZeroDivisionError: no devices per host (run again with -v for the traceback)"
    assert "Traceback" in llmc("devices", "-v").err


def test_an_interrupt_ends_with_130(llmc: Llmc, monkeypatch: pytest.MonkeyPatch) -> None:
    def survey() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("llmc.compiler.pipeline.survey.survey", survey)
    ran = llmc("devices")
    assert (ran.code, ran.out, ran.err) == (130, "", "llmc: interrupted\n")


def test_a_reader_that_stops_reading_is_no_traceback(bundle: Path) -> None:
    """`llmc generate … | head -1`."""
    command = [sys.executable, "-m", "llmc", "generate", bundle, "--prompt", "x", "--max-tokens", "1", "--json"]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode != 0
    assert "Traceback" not in said and "Exception ignored" not in said


def test_v_and_q_are_found_wherever_they_stand_but_after_two_dashes() -> None:
    assert main_module._verbosity(["-v", "plan", "-v", "m"]) == (["plan", "m"], 2)
    assert main_module._verbosity(["plan", "m", "--quiet"]) == (["plan", "m"], -1)
    assert main_module._verbosity(["generate", "--", "-v", "-q"]) == (["generate", "--", "-v", "-q"], 0)


# Starting

HEAVY = {
    "numpy", "torch", "transformers", "onnx", "onnxruntime", "tokenizers", "safetensors", "gguf", "huggingface_hub",
    "rich", "jinja2", "filelock", "sympy",
}  # fmt: skip
"""Not pydantic: typer itself reads the values of options with it."""
IMPORTED = """
    import contextlib, io, sys
    from llmc.cli.main import main
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(sys.argv[1:])
        except SystemExit as e:  # completing ends so
            code = e.code
    print(code, sorted({name.partition(".")[0] for name in sys.modules}))
"""


def imported(*arguments: object) -> set[str]:
    code, names = finish(child(IMPORTED, *arguments)).split(" ", 1)
    assert code == "0"
    return set(re.findall(r"'(\w+)'", names))


@default_cases(8)
@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)], ids=" ".join
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    found = imported(*arguments)
    assert "typer" in found, "the list is not empty by mistake"
    assert found & HEAVY == set()


def test_help_imports_only_the_module_of_the_command() -> None:
    script = IMPORTED.replace('partition(".")[0]', "strip()")
    names = finish(child(script, "plan", "--help"))
    assert "'llmc.cli.plan'" in names and "'llmc.cli.compile'" not in names
    assert "llmc.cli.plan" not in finish(child(script, "--help"))


def test_planning_and_the_survey_need_neither_torch_nor_a_runtime(toy: Path) -> None:
    frameworks = {"torch", "transformers", "onnx", "onnxruntime", "rich"}
    assert imported("plan", toy, "--max-model-len", 32) & frameworks == set()
    assert imported("devices") & frameworks == set()
