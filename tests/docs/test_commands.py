"""Every call of llmc that a document shows is one that the command line takes: its flags, their values, its names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer.core

from llmc.cli.main import main
from llmc.cli.options import CommandOfOptions
from tests.cli.conftest import surround
from tests.docs.commands import AND_SO_ON, DOCUMENTS, OF_PACKAGES, ROOT, llmc_arguments, shown
from tests.tiers import default_cases


def _known(ctx: Any) -> int:
    """What a command does here: look up the names that its values are."""
    from llmc.buckets import strategies
    from llmc.buckets.traffic import formats
    from llmc.compiler.targets import open_target as device
    from llmc.deploy import create as kind
    from llmc.integrations import bucket_rules

    look_up = {
        "--device": device, "--prefill-device": device, "--decode-device": device, "--server": bucket_rules,
        "--strategy": strategies.create, "--traffic-format": formats.create, "kind": kind,
    }  # fmt: skip
    for param in ctx.command.params:
        value = ctx.params.get(param.name)
        if isinstance(value, str) and param.opts[0] in look_up and not value.isupper():
            look_up[param.opts[0]](value)
    return 0


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Any:
    """What the command line says against arguments; "" where it takes them. No command runs."""
    surround(monkeypatch, tmp_path, tmp_path)
    for command in (typer.core.TyperCommand, CommandOfOptions):
        monkeypatch.setattr(command, "invoke", lambda _, ctx: _known(ctx), raising=False)

    def refusal(arguments: list[str]) -> str:
        capfd.readouterr()
        code = main(arguments)
        return capfd.readouterr().err if code else ""

    return refusal


@default_cases(21)
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_command_is_one_that_llmc_takes(document: Path, taken: Any) -> None:
    refused = {}
    for one in shown(document):
        for arguments in llmc_arguments(one.line):
            said = taken(arguments[:-1] if (shortened := arguments[-1:] == [AND_SO_ON]) else arguments)
            shown_too = bool(said) and said.splitlines()[-1] in one.said
            missing = shortened and "Error: Missing" in said
            if said and not (shown_too or missing) and not OF_PACKAGES & set(arguments):
                refused[f"line {one.at}: {one.line}"] = said.splitlines()[-1]
    assert not refused, "\n".join(f"{where}\n    {said}" for where, said in refused.items())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_begins_with_llmc_in_a_block_is_shown_as_a_command(document: Path) -> None:
    """Behind `$ `, or in a block for a shell: else no test sees it."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)
    unseen = [
        line for kind, text in blocks if kind != "sh" for line in text.splitlines() if re.match("llmc [a-z]", line)
    ]
    assert not unseen


def test_what_is_no_command_is_refused(taken: Any, tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(
        "```\n$ llmc compile m --devise cpu \\\n    -o b\nprinted\n$ llmc compile m --device gaudi -o b\n```\n"
        "```sh\nllmc plan m --max-model-len many > plan.txt\nA=1 llmc serv b | head   # it is called serve\n```\n"
        "    $ llmc deploy kubernets -o x\n"
    )
    calls = [(one.at, call) for one in shown(document) for call in llmc_arguments(one.line)]
    assert [at for at, _ in calls] == [2, 5, 8, 9, 11]
    assert calls[0][1] == ["compile", "m", "--devise", "cpu", "-o", "b"]
    assert next(shown(document)).said == ("printed",)
    said = [taken(call) for _, call in calls]
    hints = ("No such option: --devise", "did you mean 'hpu'", "--max-model-len", "serve", "kubernetes")
    for hint, one in zip(hints, said, strict=True):
        assert hint in one
    assert not taken(["deploy", "kubernetes", "-o", "x"])


@default_cases(21)
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_sentence_names_a_command_or_flag_that_is_none(document: Path, taken: Any) -> None:
    """What a sentence leaves out may be missing."""
    refused = {}
    for text in re.findall(r"(?<!`)`(llmc [a-z][^`\n]*)`", document.read_text()):
        for arguments in llmc_arguments(text):
            said = taken([word for word in arguments if word != AND_SO_ON])
            if "No such" in said or "unknown command" in said:
                refused[text] = said.splitlines()[-1]
    assert not refused
