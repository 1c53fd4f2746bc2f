"""`llmc generate` begins to open its bundle before the command line is read, and never does anything else for it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc.artifacts.bundle.manifest import read_manifest
from llmc.artifacts.bundle.reader import blob_path
from llmc.cli import ahead
from llmc.runtime.executors import executor_class
from llmc.runtime.startup.opening import EngineOptions
from tests.artifacts.helpers import flip
from tests.cli.helpers import Llmc
from tests.devices import noting, use
from tests.tiers import default_cases


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The threads that fake executors, which may be opened in a thread here, were opened in; every one is closed."""
    threads: list[str] = []
    closed: list[int] = []

    def note(name: str, of: object) -> None:
        if name == "check":
            threads.append(threading.current_thread().name)
        elif name == "close":
            closed.append(id(of))

    use(monkeypatch, executor=noting(note))
    yield threads
    assert len(closed) == len(threads)
    assert ahead.take("bundle") is None


def test_the_bundle_is_opened_once_and_answers_are_the_same(llmc: Llmc, bundle: Path, opened: list[str]) -> None:
    executor_class("fake").opens_in_thread = False  # the class that the fixture made
    plain = llmc("generate", "bundle", "--prompt", "a river", "--max-tokens", 6)
    executor_class("fake").opens_in_thread = True
    assert llmc("generate", "bundle", "--prompt", "a river", "--max-tokens", 6) == plain
    assert len(opened) == 2 and opened[1] == "llmc-start"


def test_threads_are_those_that_were_asked_for(bundle: Path, opened: list[str]) -> None:
    for arguments in (["--threads", "3"], ["--threads=2", "--threads=3"]):
        ahead.begin([str(bundle), *arguments])
        starting = ahead.take(bundle)
        assert starting is not None and starting.options == EngineOptions(threads=3)
        starting.abandon()
    assert len(opened) == 2


@default_cases(2)
@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["elsewhere"],
        ["bundle", "--help"],
        ["bundle", "--weights", "model"],
        ["bundle", "--speculate", "4"],
        ["bundle", "--threads", "many"],
        ["bundle", "--threads", "0"],
        ["bundle", "--threads"],
        ["bundle", "--prompt", "twin"],
    ],
    ids=" ".join,
)
def test_nothing_begins_where_there_is_doubt(arguments: list[str], here: Path, bundle: Path, opened: list[str]) -> None:
    shutil.copytree(bundle, here / "twin")
    ahead.begin(arguments)
    assert not opened


def test_a_command_line_that_cannot_be_read_is_refused_and_what_was_begun_is_closed(
    llmc: Llmc, bundle: Path, opened: list[str]
) -> None:
    ran = llmc("generate", "bundle", "--no-such-option")
    assert ran.code == 2 and "No such option" in ran.err
    assert llmc("generate", "bundle").failed(2).startswith("give the prompts in one way")
    assert len(opened) == 2


def test_what_is_damaged_is_told_once(llmc: Llmc, bundle: Path, opened: list[str]) -> None:
    flip(blob_path(bundle, read_manifest(bundle).files["weights"]))
    assert "(weights) was altered" in llmc("generate", "bundle", "--prompt", "x").failed(5)
    (bundle / "manifest.json").write_text("{}")
    assert "manifest.json" in llmc("generate", "bundle", "--prompt", "x").failed(5)
