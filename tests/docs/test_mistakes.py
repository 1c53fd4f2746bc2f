"""Every command that a document shows, run where nothing of what it names is there: one line says what is missing.

Servers, which are processes of their own: tests/server/test_serve.py.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.core

from llmc.cli.main import main
from llmc.cli.options import CommandOfOptions
from tests.cli.conftest import surround
from tests.docs.commands import AND_SO_ON, DOCUMENTS, OF_PACKAGES, llmc_arguments, shown
from tests.tiers import default_cases

MISSING = "./missing"
NAMES = {"shell", "kind", "keys", "key", "prompt", "text", "query"}
"""Arguments that are no files."""
KEY = "release"
"""What documents call a private key."""
ELSEWHERE = re.compile(r"://|\d+\.\d+\.\d+\.\d+|^ray$")
"""What other hosts are named by: nothing of these is asked for here."""


def calls() -> Iterator[tuple[str, ...]]:
    for document in DOCUMENTS:
        for one in shown(document):
            for arguments in llmc_arguments(one.line):
                elsewhere = any(ELSEWHERE.search(argument) for argument in arguments)
                shortened = arguments[-1:] == [AND_SO_ON]
                if (
                    arguments[0] != "serve"
                    and not elsewhere
                    and not shortened
                    and not OF_PACKAGES & set(arguments)
                    and "--help" not in arguments
                ):
                    yield tuple(arguments)


def files_of(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The values of a call's arguments that are files, folders or models."""
    found: list[str] = []

    def parsed(_: Any, ctx: Any) -> int:
        for param in ctx.command.params:
            value = ctx.params.get(param.name)
            if param.param_type_name == "argument" and param.name not in NAMES and value:
                found.extend(str(each) for each in (value if isinstance(value, list | tuple) else [value]))
        return 0

    with monkeypatch.context() as patch:
        for command in (typer.core.TyperCommand, CommandOfOptions):
            patch.setattr(command, "invoke", parsed, raising=False)
        main(list(arguments))
    return found


EVERY = sorted(set(calls()))


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    surround(monkeypatch, tmp_path / "empty", tmp_path / "cache")


def test_there_are_many() -> None:
    assert len(EVERY) > 150


@default_cases(76)
@pytest.mark.parametrize("call", EVERY, ids=shlex.join)
def test_what_is_missing_is_named(
    call: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    files = files_of(call, monkeypatch)
    if not files or call[:2] == ("cache", "keygen"):
        return
    wrong = [MISSING if one in files else one for one in call if one not in ("-v", "--verbose")]
    capfd.readouterr()
    code = main(wrong)
    said = capfd.readouterr().err
    assert code in (1, 2, 3, 5), said
    last = said.rstrip().splitlines()[-1]
    named = [MISSING.removeprefix("./"), *(one for one in wrong if "." in one or one == KEY)]
    assert any(one in last for one in named), last
    assert "unexpected" not in last and "Traceback" not in said
