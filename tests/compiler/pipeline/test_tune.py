"""Tuning a bundle: what is kept after each executable, merged with what was known, and refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.digest import digest_bytes
from llmc.compiler.pipeline.tune import tune_bundle
from llmc.compiler.targets.fake import FakeTarget
from llmc.compiler.targets.tuning import RESULTS, STAGE, Results, Tuner, read_results
from llmc.errors import ArtifactError, DeviceError, InputError
from llmc.runtime.bundle import Bundle
from tests.toy import Toy


class OnDevice(Tuner):
    """Finds one product an executable; `stop` is called before each."""

    def __init__(self, gpu: str = "fake-1", lack: str = "", stop: Callable[[int], None] = lambda done: None) -> None:
        self.gpu, self.lack, self.stop, self.requested = gpu, lack, stop, 0

    def lacks(self) -> str:
        return self.lack

    def tune(self, bundle: Bundle, executable: Any, known: Results | None) -> Results:
        self.stop(self.requested)
        self.requested += 1
        found = Results({"gpu": self.gpu}, {str(executable): b"fast"})
        return found if known is None else known.merged(found)


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    built = Toy.make(tmp_path)
    built.compile(specialise=True)
    return built


def put_in(monkeypatch: pytest.MonkeyPatch, tuner: Tuner) -> None:
    monkeypatch.setattr(FakeTarget, "tuner", lambda self: tuner)


def tune(toy: Toy, file: Path | None = None) -> Any:
    lines: list[str] = []
    result = tune_bundle(Bundle.open(toy.bundle), toy.store, file, lambda text, done, total: lines.append(text))
    assert len(lines) == result.tuned
    return result


def test_results_are_in_the_file_and_in_the_store(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, OnDevice())
    result = tune(toy, tmp_path / "found.json")
    names = {str(e) for e in Bundle.open(toy.bundle).manifest.executables}
    assert (result.results, result.new, result.tuned) == (len(names), len(names), result.executables)
    assert read_results(tmp_path / "found.json") == Results({"gpu": "fake-1"}, dict.fromkeys(names, b"fast"))
    assert result.digest == digest_bytes((tmp_path / "found.json").read_bytes())
    assert result.digest in [entry.outputs[RESULTS].digest for entry in toy.store.entries(STAGE)]


def test_an_interrupt_keeps_what_was_found_and_the_next_run_adds(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(done: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    put_in(monkeypatch, OnDevice(stop=stop))
    first = tune(toy, tmp_path / "found.json")
    assert first.interrupted
    assert (first.tuned, first.results) == (1, 1)
    assert len(read_results(tmp_path / "found.json").found) == 1
    put_in(monkeypatch, OnDevice())
    second = tune(toy, tmp_path / "found.json")
    assert (second.interrupted, second.new) == (False, second.results - 1)


def test_a_file_of_another_gpu_stays_as_it_is(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, OnDevice())
    tune(toy, tmp_path / "found.json")
    before = (tmp_path / "found.json").read_bytes()
    put_in(monkeypatch, OnDevice("fake-2"))
    with pytest.raises(ArtifactError, match="gpu fake-1, not fake-2"):
        tune(toy, tmp_path / "found.json")
    assert (tmp_path / "found.json").read_bytes() == before


def test_a_device_that_has_nothing_to_tune_says_so(toy: Toy) -> None:
    with pytest.raises(InputError, match="device fake has nothing to tune"):
        tune(toy)


def test_a_host_without_the_gpu_says_what_to_do(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, OnDevice(lack="a GPU; run it where the GPU is"))
    with pytest.raises(DeviceError, match="tuning for fake needs a GPU; run it where the GPU is"):
        tune(toy)
