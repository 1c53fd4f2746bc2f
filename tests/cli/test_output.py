"""What a compile tells while it runs."""

from __future__ import annotations

import io
import re
import sys
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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(patch: pytest.MonkeyPatch, columns: int) -> Terminal:
    patch.setattr(sys, "stdout", screen := Terminal())
    patch.setenv("COLUMNS", str(columns))
    return screen


SENTENCE = "left for the device's own host: " + ", ".join(f"step {number} of what is left" for number in range(9))


@pytest.mark.parametrize(("columns", "widest"), [(60, 60), (100, 100), (300, 100)])
def test_sentences_are_wrapped_on_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int, widest: int) -> None:
    screen = on_terminal(monkeypatch, columns)
    output.echo(f"short\n{SENTENCE}\n")
    first, *lines, last = screen.getvalue().splitlines()
    assert (first, last) == ("short", "")
    assert len(lines) > 1 and all(len(line) <= widest for line in lines)
    assert all(line.startswith("  ") and line.strip() for line in lines[1:])
    assert " ".join(line.strip() for line in lines) == SENTENCE


def test_what_is_copied_or_read_by_programs_is_never_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    json, row, path = '{"notes": "' + "a word " * 30 + '"}', "decode   " + "1 2 3 4 " * 20, "/" + "f" * 200
    screen = on_terminal(monkeypatch, 80)
    for text in (json, row, path):
        output.echo(text)
    output.echo(SENTENCE, verbatim=True)
    assert screen.getvalue() == f"{json}\n{row}\n{path}\n{SENTENCE}\n"


def test_nothing_is_wrapped_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    output.echo(SENTENCE)
    output.print_table(("A", "B"), [("1", SENTENCE)])
    assert capsys.readouterr().out == f"{SENTENCE}\nA  B\n1  {SENTENCE}\n"


def test_the_last_cell_of_a_table_is_wrapped_in_its_column(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_terminal(monkeypatch, 80)
    output.print_table(("DEVICE", "NOTE"), [("cpu", SENTENCE), ("hpu", "short")])
    title, first, *more, last = screen.getvalue().splitlines()
    assert (title, last) == ("DEVICE  NOTE", "hpu     short")
    assert first.startswith("cpu     left for ") and more
    assert all(len(line) <= 80 and line[:8].isspace() for line in more)
    assert " ".join([first[8:], *(line[8:] for line in more)]) == SENTENCE


def test_a_table_with_no_room_for_its_last_cell_is_left_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_terminal(monkeypatch, 80)
    output.print_table(("A" * 75, "B"), [("a", SENTENCE)])
    assert screen.getvalue().splitlines()[1] == f"{'a':75}  {SENTENCE}"
