"""What documents point at is there: links between files, and the files of code that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
HISTORY = {"2026-11.md"}
"""Told at the time; files may have moved since."""

_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
_CODE = re.compile(r"`((?:\.\./|[\w-]+/)*[\w-]+\.(?:py|c|h|toml|html))(?:::[^`]*)?`")
_FOLDER = re.compile(r"`((?:[\w-]+/)+)`")
_KEY_CODE = re.compile(r"^ +code: ([\w.]+)$", re.MULTILINE)
NOT_OURS = {".git", "demo", "site", "build"}
"""Beside these, .venv and its kin: tens of thousands of files."""
KNOWN = {
    path.relative_to(ROOT).as_posix()
    for top in ROOT.iterdir()
    if top.name not in NOT_OURS and not top.name.startswith(".venv")
    for path in [top, *top.rglob("*")]
}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_merge_was_left_half_done(document: Path) -> None:
    assert not re.search(r"^(<{7}|>{7}) |^={7}$", document.read_text(), re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_named_files_are_there(document: Path) -> None:
    text = document.read_text()
    links = [link for link in _LINK.findall(text) if not (document.parent / link).exists()]
    assert not links, f"{document.name} links to what is not there"
    if document.name not in HISTORY:
        known = {f"/{path}" for path in KNOWN}
        named = [name for name in _CODE.findall(text) if name == name.lower()]  # in capitals: a placeholder
        named += [folder.rstrip("/") for folder in _FOLDER.findall(text)]
        named += ["llmc/" + module.replace(".", "/") + ".py" for module in _KEY_CODE.findall(text)]
        gone = [name for name in named if not any(path.endswith("/" + name.removeprefix("../")) for path in known)]
        assert not gone, f"{document.name} names files that are not there"
