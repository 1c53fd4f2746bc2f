"""An engine in a process of its own: what it answers, and what is said when it cannot."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from llmc.bench import worker
from llmc.bench.worker import EngineError, Worker, command

FAKE = Path(__file__).with_name("fake_engine.py")


def engine(folder: Path, model: str = "model", file: Path = FAKE, **options: Any) -> Worker:
    return Worker("one", command(sys.executable, file, {"model": model, "threads": 1, **options}), folder / "log")


def test_only_answers_are_read_and_all_else_is_in_the_log(tmp_path: Path) -> None:
    with engine(tmp_path) as one:
        assert one.ask("prefill", prompt=[1, 2, 3]) == {"seconds": 0.003}
    log = (tmp_path / "log").read_text()
    assert "noise on stdout" in log and "a complaint" in log


def test_an_engine_is_reported_its_options(tmp_path: Path) -> None:
    with engine(tmp_path, step_ms=5.0, unknown=3) as one:
        assert one.ask("decode", prompts=[[1]], steps=1)["steps"] == [0.005]


def test_an_engine_that_does_not_open_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="one: open: OSError: no such model"):
        engine(tmp_path, "does-not-open")


def test_an_engine_that_refuses_goes_on(tmp_path: Path) -> None:
    with engine(tmp_path, "refuses") as one:
        with pytest.raises(EngineError, match="one: decode: ValueError: no batch of 2"):
            one.ask("decode", prompts=[[1], [2]], steps=1)
        assert one.ask("warm") == {}


def test_what_an_engine_lacks_is_said(tmp_path: Path) -> None:
    with engine(tmp_path) as one, pytest.raises(EngineError, match="one: fly: this engine does not do that"):
        one.ask("fly")


def test_an_engine_that_dies_leaves_its_exit_code_and_last_words(tmp_path: Path) -> None:
    with engine(tmp_path, "dies") as one:
        with pytest.raises(EngineError, match=r"one ended in decode with exit code 7: .*a complaint") as caught:
            one.ask("decode", prompts=[[1]], steps=1)
        assert str(tmp_path / "log") in str(caught.value)
        with pytest.raises(EngineError, match="one has ended"):
            one.ask("warm")


def test_memory_is_looked_at_while_an_answer_is_built(tmp_path: Path) -> None:
    with engine(tmp_path) as one:
        answer, most = one.ask_with_memory("warm")
    assert answer == {}
    assert 1e6 < most < 1e9


def test_a_first_token_takes_the_whole_process(tmp_path: Path) -> None:
    with engine(tmp_path) as one:
        assert 0.005 < one.first_token("Why?") < 10


def test_an_answer_without_text_is_no_first_token(tmp_path: Path) -> None:
    with engine(tmp_path, "silent") as one, pytest.raises(EngineError, match="the engine returned no text"):
        one.first_token("Why?")


def test_a_file_beside_the_launcher_hides_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's folder is not searched: an engine of the name of its library would find itself."""
    monkeypatch.setattr(worker, "LAUNCH", Path(shutil.copy(worker.LAUNCH, tmp_path)))
    (tmp_path / "numpy.py").write_text("raise ImportError('not numpy')")
    (tmp_path / "engine.py").write_text("import numpy\nclass Engine:\n    def __init__(self, model, threads): pass\n")
    engine(tmp_path, file=tmp_path / "engine.py").close()
