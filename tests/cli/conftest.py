from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmc.cli.main import main
from tests.cli.helpers import Llmc, Ran
from tests.toy import write_toy


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The folder that commands are run in."""
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


@pytest.fixture
def llmc(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, here: Path) -> Llmc:
    """Runs a command line in this process, in the folder `here`, with the store `cache` beside it."""
    for variable in [name for name in os.environ if name.startswith(("VLLM_", "LLMC_"))]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(here)

    def run(*arguments: object) -> Ran:
        capfd.readouterr()
        code = main([str(a) for a in arguments])
        return Ran(code, *capfd.readouterr())

    return run


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A toy checkpoint, which --device fake compiles in milliseconds."""
    return write_toy(tmp_path / "toy")


@pytest.fixture
def bundle(llmc: Llmc, toy: Path, here: Path) -> Path:
    """A bundle of the toy: at most 4 sequences of 32 tokens."""
    made = llmc("compile", toy, "--device", "fake", "--max-model-len", 32, "--max-num-seqs", 4, "-o", "bundle", "-q")
    assert made.code == 0, made
    return here / "bundle"
