"""Text of strangers on a terminal: shown, and not obeyed; URLs without their logins."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path

import pytest

from llmc.cli import output
from llmc.cli.main import _logging, main
from llmc.errors import InputError
from llmc.shown import shown, shown_lines, without_logins
from llmc.testing.toy import write_toy

CLEARS = "\x1b[2J\x1b]0;title\x07"


@pytest.mark.parametrize(
    ("text", "as_shown"),
    [
        ("\x1b[2J", "\\x1b[2J"), ("a\rb\bc", "a\\rb\\x08c"), ("\x9b31m", "\\x9b31m"),
        ("x\u202egnp.exe", "x\\u202egnp.exe"),
        ("a\nb\tc", "a\\nb\\tc"), ("m\udcff", "m\\udcff"), ("\u2028", "\\u2028"),
        ("né 日本 👩‍🔬 \\n", "né 日本 👩‍🔬 \\n"),
    ],
)  # fmt: skip
def test_what_a_terminal_would_obey_is_shown_as_an_escape(text: str, as_shown: str) -> None:
    assert shown(text) == as_shown
    assert shown_lines(text) == as_shown.replace("a\\nb\\tc", "a\nb\tc")
    as_shown.encode()


def test_an_error_is_one_line_whatever_name_it_repeats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"a\nllmc: all is well{CLEARS}"
    for command in (
        ["generate", name, "--prompt", "a"],
        ["plan", name],
        ["cache", "show", name],
        ["compile", name, "-o", "bundle"],
    ):
        assert main(command) != 0
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "\x1b" not in said and "\\x1b[2J" in said, said


def test_a_model_s_name_is_shown_in_tables_and_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "store"))
    model = write_toy(tmp_path / f"toy{CLEARS}")
    bundle = tmp_path / "bundle"
    assert main(["compile", str(model), "--device", "fake", "--max-model-len", "32", "-o", str(bundle)]) == 0
    for command in (["cache", "show", str(bundle)], ["cache", "ls"], ["report", str(bundle)], ["plan", str(model)]):
        assert main([*command]) == 0
    said = "".join(capsys.readouterr())
    assert "\x1b" not in said and "\x07" not in said
    assert "toy\\x1b[2J" in said


def test_a_model_s_words_are_shown_to_a_terminal_and_given_as_they_are_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, said in ((io.StringIO(), f"a{CLEARS}\n"), (Terminal(), "a\\x1b[2J\\x1b]0;title\\x07\n")):
        monkeypatch.setattr(sys, "stdout", stream)
        output.say(f"a{CLEARS}\n")
        assert stream.getvalue() == said


def test_logs_are_lines_of_plain_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    _logging(0)
    logging.getLogger("llmc").warning("model %s of %s", f"x\n{CLEARS}", "https://me:secret@host/path")
    assert capsys.readouterr().err == "model x\\n\\x1b[2J\\x1b]0;title\\x07 of https://***@host/path\n"


@pytest.mark.parametrize(
    ("text", "as_shown"),
    [
        ("s3://key:secret@bucket/x", "s3://***@bucket/x"), ("http://token@host:80", "http://***@host:80"),
        ("oci://host/name@sha256:0", "oci://host/name@sha256:0"), ("mail me@host", "mail me@host"),
    ],
)  # fmt: skip
def test_an_error_does_not_repeat_a_url_s_login(text: str, as_shown: str) -> None:
    assert str(InputError(f"{text} is wrong")) == f"{as_shown} is wrong"
    assert without_logins(text) == as_shown


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "oci://me:s3cret@host/name:tag"], ["cache", "pull", "oci://me:s3cret@host/name:tag"],
        ["plan", "--traffic", "http://me:s3cret@127.0.0.1:9/metrics"],
        ["cache", "push", "http://me:s3cret@[bad/x", "b"],
        ["traffic", "show", "http://me:s3cret@127.0.0.1:9/metrics"],
    ],
)  # fmt: skip
def test_commands_do_not_repeat_it_either(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) != 0
    assert "s3cret" not in "".join(capsys.readouterr())
