"""The pages of those who start with the demo model: every command runs, in order, and prints what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.commands import ROOT
from tests.docs.running import Page, missing, runs
from tests.tiers import full


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one page compiled, the next has, too."""
    return tmp_path_factory.mktemp("pages") / "cache"


@pytest.mark.full
@pytest.mark.real_weights
@pytest.mark.parametrize("name", ["quickstart", "cpu-server"])
def test_what_a_page_shows_runs_and_prints_that(name: str, store: Path, tmp_path: Path) -> None:
    commands = runs(Page(ROOT / "docs" / f"{name}.md", tmp_path, store))
    assert any(command.startswith("llmc deploy ") for command in commands[-2:]), "it ends with something deployed"


def page_of(folder: Path, text: str) -> Page:
    (folder / "page.md").write_text(text)
    return Page(folder / "page.md", folder, folder / "cache")


def test_a_command_that_fails_fails_its_page(tmp_path: Path) -> None:
    page = page_of(tmp_path, "```\n$ pip install nothing-of-that-name\n$ echo 1\n1\n$ llmc plan gone.json\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md, line 5: llmc plan gone\.json\nllmc: error: .*gone\.json"):
        assert [one.line for one, _ in page.run()] == ["echo 1"]


@full
def test_a_server_that_does_not_start_fails_its_page(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)llmc serve gone --port .*error: gone: no such file"):
        list(page_of(tmp_path, "```\n$ llmc serve gone --port 8000\n```\n").run())


@pytest.mark.parametrize(
    ("said", "printed", "expected"),
    [
        ("took 1.5 s, 3 MB", "took   12 ms, 4.1 GiB", None),
        ("a\n…\nd 9", "a\nb\nc\nd 10", None),
        ("weights … MB", "weights 3 or 4 MB", None),
        ("a\nb", "b\na", "b"),
        ("native 1", "portable 1", "native 1"),
        ("limit 5%", "limit 5", "limit 5%"),
        ("9 built", "none built", "9 built"),
    ],
)
def test_numbers_may_differ_and_words_may_not(said: str, printed: str, expected: str | None) -> None:
    assert missing(tuple(said.splitlines()), printed) == expected
