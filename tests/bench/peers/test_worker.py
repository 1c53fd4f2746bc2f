"""An engine in a process of its own: what it answers, and what is said when it cannot."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llmc.bench.peers.worker import Contender, EngineError, Worker, first_token

Make = Callable[..., Contender]


def test_only_answers_are_read_and_all_else_is_in_the_log(contender: Make, tmp_path: Path) -> None:
    with Worker(contender("one"), 1, tmp_path / "log") as worker:
        assert worker.ask("prefill", prompt=[1, 2, 3]) == {"seconds": 0.003}
    log = (tmp_path / "log").read_text()
    assert "noise on stdout" in log and "a complaint" in log


def test_an_engine_is_told_its_model_threads_and_options(contender: Make, tmp_path: Path) -> None:
    with Worker(contender("one", step_ms=5.0), 1, tmp_path / "log", unknown=3) as worker:
        assert worker.ask("decode", prompts=[[1]], steps=1)["steps"] == [0.005]


def test_an_engine_that_does_not_open_says_why(contender: Make, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="one: open: OSError: no such model"):
        Worker(contender("one", model="does-not-open"), 1, tmp_path / "log")


def test_an_engine_that_refuses_goes_on(contender: Make, tmp_path: Path) -> None:
    with Worker(contender("one", model="refuses"), 1, tmp_path / "log") as worker:
        with pytest.raises(EngineError, match="one: decode: ValueError: no batch of 2"):
            worker.ask("decode", prompts=[[1], [2]], steps=1)
        assert worker.ask("warm") == {}


def test_what_an_engine_lacks_is_said(contender: Make, tmp_path: Path) -> None:
    with (
        Worker(contender("one"), 1, tmp_path / "log") as worker,
        pytest.raises(EngineError, match="one: fly: this engine does not do that"),
    ):
        worker.ask("fly")


def test_an_engine_that_dies_leaves_its_exit_code_and_last_words(contender: Make, tmp_path: Path) -> None:
    with Worker(contender("one", model="dies"), 1, tmp_path / "log") as worker:
        with pytest.raises(EngineError, match=r"one ended in decode with exit code 7: .*a complaint") as caught:
            worker.ask("decode", prompts=[[1]], steps=1)
        assert str(tmp_path / "log") in str(caught.value)
        with pytest.raises(EngineError, match="one has ended"):
            worker.ask("warm")


def test_memory_is_looked_at_while_an_answer_is_made(contender: Make, tmp_path: Path) -> None:
    with Worker(contender("one"), 1, tmp_path / "log") as worker:
        answer, most = worker.ask_with_memory("warm")
    assert answer == {}
    assert 1e6 < most < 1e9


def test_a_first_token_takes_the_whole_process(contender: Make, tmp_path: Path) -> None:
    assert 0.005 < first_token(contender("one"), 1, "Why?", tmp_path / "log") < 10


def test_an_answer_without_text_is_no_first_token(contender: Make, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no text came"):
        first_token(contender("one", model="silent"), 1, "Why?", tmp_path / "log")


def test_a_file_beside_the_launcher_hides_no_library(contender: Make, tmp_path: Path) -> None:
    """The engines' folder is not searched: an engine of the name of its library would find itself."""
    engines = tmp_path / "engines"
    engines.mkdir()
    launch = Path(Worker.__init__.__globals__["ENGINES"]) / "launch.py"
    shutil.copy(launch, engines)
    (engines / "numpy.py").write_text("raise ImportError('not numpy')")
    (engines / "engine.py").write_text("import numpy\nclass Engine:\n    def __init__(self, model, threads): pass\n")
    module = pytest.MonkeyPatch()
    with module.context() as patch:
        patch.setattr("llmc.bench.peers.worker.ENGINES", engines)
        made = contender("one")
        Worker(Contender("one", "peer", "engine", made.python, "m"), 1, tmp_path / "log").close()
