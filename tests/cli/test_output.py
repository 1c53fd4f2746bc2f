"""What a compile tells while it runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llmc.artifacts.digest import digest_file
from llmc.cli import output
from llmc.compiler import stages as stages_module
from llmc.compiler.pipeline.compile import BeginReport
from llmc.compiler.stages import StageReport
from tests.timing import until


def test_a_stage_of_many_parts_says_now_and_then_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "quiet", False)
    with output.CompileProgress(hidden=False) as progress:
        progress(StageReport("calibrate", False, None))
        for done in range(1, 31):
            progress(StageReport("calibrate", False, None, done, 30))
        progress(StageReport("calibrate", False, 61.5))
    assert capsys.readouterr().err.splitlines() == ["calibrate: 1 of 30", "calibrate: 61.5 s"]


def test_a_silent_stage_and_a_long_compile_are_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "quiet", False)
    monkeypatch.setattr(output, "SILENT_S", 0.0)
    with output.CompileProgress(hidden=False) as progress:
        progress(BeginReport(lambda: 40.0))
        assert capsys.readouterr().err == "", "what is refused before the first stage takes no time"
        progress(StageReport("weights", False, None))
        assert capsys.readouterr().err == "this takes about 40 s\n"
        reported: list[str] = []
        until(lambda: reported.extend(capsys.readouterr().err.splitlines()) or reported)
        progress(StageReport("weights", False, 1.2))
    assert re.fullmatch(r"weights … about 3\d s left in all", reported[0])
    with output.CompileProgress(hidden=False) as progress:
        progress(BeginReport(lambda: 4.0))
        progress(StageReport("trace", True, 0.0))
    assert "this takes" not in capsys.readouterr().err


def test_the_reading_of_a_large_checkpoint_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages_module, "LARGE", 1)
    monkeypatch.setattr(stages_module, "MB", 1)
    path, reported = tmp_path / "weights", list[StageReport]()
    path.write_bytes(b"abc")
    stages = stages_module.Stages(None, None, None, reported.append, None)  # type: ignore[arg-type]
    assert stages._digest(path, 3) == digest_file(path)
    assert reported == [StageReport("read", False, None, 3, 3)]
