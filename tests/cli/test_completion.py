"""`llmc completion`: what real shells complete by its scripts, and what that takes."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from llmc.cli.completion import SHELLS
from llmc.cli.root import COMMANDS
from llmc.compiler.targets import offered
from tests.artifacts.helpers import REPO
from tests.cli.helpers import Llmc
from tests.cli.test_main import HEAVY, imported
from tests.tiers import default_cases, full

COMPLETED = """
eval "$(llmc completion bash)"
{before}
COMP_LINE={line} COMP_WORDS=({words}) COMP_CWORD={last}
_llmc_completion llmc
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
MISSING = {
    "bash": "no bash here",
    "fish": "no shell to complete for: apt-get install fish",  # skipped
    "zsh": "no shell to complete for: apt-get install zsh",  # skipped
}
BEGIN = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}
SET_UP = {"bash": "", "zsh": "autoload -Uz compinit; compinit -u -D; "}


def shells(*names: str) -> list[Any]:
    """Parameters; bash is on every Debian."""
    return [pytest.param(name, marks=() if name == "bash" else pytest.mark.full) for name in names]


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`llmc` where shells look for it, in a folder with a model."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "model.gguf").write_bytes(b"")
    script = tmp_path / "bin" / "llmc"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={REPO} exec {sys.executable} -m llmc "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.chdir(tmp_path)


def needs(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(MISSING[shell])


def run(*command: str) -> str:
    needs(command[0])
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def bash(line: str, breaks: str = ":=", before: str = "") -> list[str]:
    """What it completes of a line that ends at the cursor; words end at `breaks`, too, as COMP_WORDBREAKS has them."""
    words = [part for word in line.split(" ") for part in re.split(f"([{breaks}])" if breaks else "$^", word)]
    kept = [word for n, word in enumerate(words) if word or n == len(words) - 1]
    if len(kept) > 1 and kept[-1] == "" and kept[-2] in breaks and not line.endswith(" "):
        kept.pop()  # the cursor is at a break: that is the word
    script = COMPLETED.format(
        line=shlex.quote(line), words=shlex.join(kept), last=len(kept) - 1,
        before=before or f"COMP_WORDBREAKS=$' \\n{breaks}'",
    )  # fmt: skip
    return run("bash", "--norc", "-c", script).split()


def fish(words: str) -> list[str]:
    return run("fish", "-N", "-c", f"llmc completion fish | source; complete -C {shlex.quote(words)}").splitlines()


@full
def test_bash_completes_commands_options_devices_and_values() -> None:
    assert bash("llmc co") == ["compile", "completion"]
    assert bash("llmc compile m --devi") == ["--device"]
    assert bash("llmc compile m --device ") == offered() and "fake" not in offered()
    assert bash("llmc serve m --quantize int") == ["int8", "int4"]
    assert bash("llmc cache ver") == ["verify"]
    assert bash("llmc plan ev") == ["evaluate"]
    assert bash("llmc completion ") == list(SHELLS)
    assert bash("llmc compile mo") == [], "paths are the shell's own"
    assert bash("llmc compile m --plan=mo") == []


@full
@pytest.mark.parametrize("breaks", ["", ":", "=", ":="])
def test_bash_completes_a_value_behind_an_equals_sign(breaks: str) -> None:
    """What replaces the word that the shell sees: all of it, or what stands behind its last break."""
    option = "" if "=" in breaks else "--device="
    assert bash("llmc compile m --device=hp", breaks) == [f"{option}hpu"]
    assert bash("llmc compile m --device=", breaks) == [option + device for device in offered()]
    assert bash("llmc compile m --quantize=int8 --device=hp", breaks) == [f"{option}hpu"]
    assert bash("llmc compile m --quantize=int8 --device hp", breaks) == ["hpu"]


@default_cases(1)
@pytest.mark.parametrize(("breaks", "reply"), [("=", "tpu:v5e-2x2"), (":=", "v5e-2x2")])
def test_bash_is_given_what_stands_behind_a_colon(breaks: str, reply: str) -> None:
    """Of a value that llmc completes whole; here another command says it."""
    answer = "env() { printf '%s\\n' tpu:v5e-2x2; }"
    before = f"COMP_WORDBREAKS=$' \\n{breaks}'; {answer}"
    assert bash("llmc compile m --device=tpu:v", breaks, before) == [reply]
    assert bash("llmc compile m --device tpu:", breaks, before) == [reply]


@pytest.mark.full
def test_fish_completes_with_the_help_of_each() -> None:
    assert fish("llmc compile m --device on") == ["onnxruntime"]
    assert fish("llmc ver") == [f"verify\t{COMMANDS['verify'][1]}"]
    assert fish("llmc compile mod") == ["model.gguf"]
    assert fish("llmc compile m --device=hp") == ["--device=hpu"]
    assert fish("llmc compile m --plan=mod") == ["--plan=model.gguf"]


@full
@pytest.mark.parametrize("shell", shells(*BEGIN))
def test_what_is_typed_at_a_terminal_is_completed_paths_too(shell: str) -> None:
    needs(shell)
    terminal, inner = pty.openpty()
    with subprocess.Popen(BEGIN[shell], stdin=inner, stdout=inner, stderr=inner, start_new_session=True) as process:
        os.close(inner)
        try:
            os.write(terminal, f"{SET_UP[shell]}eval \"$(llmc completion {shell})\"; echo is''ready\n".encode())
            assert "isready" in read(terminal, "isready")
            os.write(terminal, b"llmc compi\tmod\t--device onn\t--quantize=kee\t")
            shown = read(terminal, "keep")
            assert "compile" in shown and "model.gguf" in shown and "onnxruntime" in shown, shown
            assert "--quantize=keep " in shown, shown
        finally:
            process.kill()
            os.close(terminal)


def read(terminal: int, until: str) -> str:
    """What a terminal shows, until that is there."""
    shown, ends = "", time.monotonic() + 60
    while until not in shown and time.monotonic() < ends:
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace")
    return shown


@pytest.mark.parametrize("shell", shells(*SHELLS))
def test_a_script_has_no_error_of_syntax(shell: str, llmc: Llmc, here: Path) -> None:
    needs(shell)
    (here / "script").write_text(llmc("completion", shell).out)
    run(shell, "-n", str(here / "script"))


def test_no_other_shell(llmc: Llmc) -> None:
    assert llmc("completion", "tcsh").failed(2).startswith("unknown shell 'tcsh'; known: bash, fish, zsh")


def test_completing_imports_nothing_heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "llmc\ncompile\n--device\n"
    for name, value in {"_LLMC_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "3"}.items():
        monkeypatch.setenv(name, value)
    found = imported()
    assert "typer" in found and found & HEAVY == set()
