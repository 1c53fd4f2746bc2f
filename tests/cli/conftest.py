from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import typer.main

from llmc.cli.main import main
from llmc.testing.toy import write_toy
from tests.cli.helpers import Llmc, Ran

BUNDLE = ("--device", "fake", "--max-model-len", 32, "--max-num-seqs", 4, "-o", "bundle", "-q")
"""How a bundle of the toy is compiled: at most 4 sequences of 32 tokens."""


def remembered(params_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`params_of`, asked once for each function as long as that is there."""
    known: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def look_up(function: Any) -> Any:
        if function not in known:
            known[function] = params_of(function)
        return known[function]

    return look_up


# a command line begins with the annotations of its command, and of all its neighbours, evaluated: a third of the time
# of the thousands that tests run in one process
typer.main.get_params_from_function = remembered(typer.main.get_params_from_function)


def surround(patch: pytest.MonkeyPatch, folder: Path, cache: Path) -> None:
    """Commands run in `folder` with the store `cache`, and no setting of whoever runs the tests."""
    for variable in [name for name in os.environ if name.startswith(("VLLM_", "LLMC_"))]:
        patch.delenv(variable)
    patch.setenv("LLMC_CACHE_DIR", str(cache))
    patch.chdir(folder)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The folder that commands are run in."""
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


@pytest.fixture
def llmc(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, here: Path) -> Llmc:
    """Runs a command line in this process, in the folder `here`, with the store `cache` beside it."""
    surround(monkeypatch, here, tmp_path / "cache")

    def run(*arguments: object) -> Ran:
        capfd.readouterr()
        code = main([str(a) for a in arguments])
        return Ran(code, *capfd.readouterr())

    return run


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A toy checkpoint, which --device fake compiles in milliseconds."""
    return write_toy(tmp_path / "toy")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a toy, a bundle of it and the store `cache` of its compile, which nobody changes."""
    folder = tmp_path_factory.mktemp("made")
    toy = write_toy(folder / "toy")
    with pytest.MonkeyPatch.context() as patch:
        surround(patch, folder, folder / "cache")
        assert main([str(word) for word in ("compile", toy, *BUNDLE)]) == 0
    return folder


@pytest.fixture
def bundle(built: Path, llmc: Llmc, tmp_path: Path, here: Path) -> Path:
    """A copy of the bundle in `built`, beside one of its store."""
    shutil.copytree(built / "cache", tmp_path / "cache")
    return shutil.copytree(built / "bundle", here / "bundle")


@pytest.fixture
def keys(llmc: Llmc, here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A key in ./release, and an empty folder of trusted keys."""
    monkeypatch.setenv("LLMC_TRUSTED_KEYS", str(here / "trusted"))
    assert llmc("cache", "keygen", "release").code == 0
    return here
