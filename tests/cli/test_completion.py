"""`llmc completion`: what real shells complete by its scripts, and what that takes."""

from __future__ import annotations

import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmc.cli.completion import SHELLS
from llmc.cli.root import COMMANDS
from llmc.compiler.targets.declared import offered
from tests.artifacts.helpers import REPO
from tests.cli.helpers import Llmc
from tests.cli.test_main import HEAVY, imported

COMPLETED = """
eval "$(llmc completion bash)"
set -- {words}
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
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


def bash(words: str) -> list[str]:
    return run("bash", "--norc", "-c", COMPLETED.format(words=shlex.join(words.split(" ")))).split()


def fish(words: str) -> list[str]:
    return run("fish", "-N", "-c", f"llmc completion fish | source; complete -C {shlex.quote(words)}").splitlines()


def test_bash_completes_commands_options_devices_and_values() -> None:
    assert bash("llmc co") == ["compile", "completion"]
    assert bash("llmc compile m --devi") == ["--device"]
    assert bash("llmc compile m --device ") == offered() and "fake" not in offered()
    assert bash("llmc serve m --quantize int") == ["int8", "int4"]
    assert bash("llmc cache ver") == ["verify"]
    assert bash("llmc plan ev") == ["evaluate"]
    assert bash("llmc completion ") == list(SHELLS)
    assert bash("llmc compile mo") == [], "paths are the shell's own"


def test_fish_completes_with_the_help_of_each() -> None:
    assert fish("llmc compile m --device on") == ["onnxruntime"]
    assert fish("llmc ver") == [f"verify\t{COMMANDS['verify'][1]}"]
    assert fish("llmc compile mod") == ["model.gguf"]


@pytest.mark.parametrize("shell", BEGIN)
def test_what_is_typed_at_a_terminal_is_completed_paths_too(shell: str) -> None:
    needs(shell)
    terminal, inner = pty.openpty()
    with subprocess.Popen(BEGIN[shell], stdin=inner, stdout=inner, stderr=inner, start_new_session=True) as process:
        os.close(inner)
        try:
            os.write(terminal, f"{SET_UP[shell]}eval \"$(llmc completion {shell})\"; echo is''ready\n".encode())
            assert "isready" in read(terminal, "isready")
            os.write(terminal, b"llmc compi\tmod\t--device onn\t")
            shown = read(terminal, "onnxruntime")
            assert "compile" in shown and "model.gguf" in shown and "onnxruntime" in shown, shown
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


@pytest.mark.parametrize("shell", SHELLS)
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
