"""What a compile tells while it runs."""

from __future__ import annotations

import pytest

from llmc.cli import output
from llmc.compiler.stages import StageReport


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
