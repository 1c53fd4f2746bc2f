"""The commands that documents show, and what they say these print."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *(ROOT / "docs").rglob("*.md")]
)

AND_SO_ON = "…"
"""As the last word: here come more."""
OF_PACKAGES = {"half-octaves", "pocket"}
"""A strategy and a device that documents teach to write: a package of somebody's own has them."""

_HEADING = re.compile(r"## (.+)")
_FENCE = re.compile(r"```(\w*)$")
_OPERATOR = re.compile(r"[|&;<>()]+")
_ASSIGNMENT = re.compile(r"\w+=")


@dataclass(frozen=True)
class Shown:
    """A command line as a shell takes it, its document, the anchor of the `##` heading above it and the line where it
    begins, its output there, and what its block is said to be: "sh" has commands alone, and is to be read more than to
    be typed."""

    document: Path
    section: str
    at: int
    line: str
    said: tuple[str, ...]
    language: str | None


def shown(document: Path) -> Iterator[Shown]:
    """Every line after `$ ` in a block, fenced or indented, and every line of a block for a shell."""
    language: str | None = None
    at, line, said, block, section = 0, "", [], language, ""
    for number, text in enumerate([*document.read_text().splitlines(), "```", ""], 1):
        if fence := _FENCE.match(text):
            language = fence[1] if language is None else None
        if language is None and (heading := _HEADING.match(text)):
            section = re.sub(r"[^\w\- ]", "", heading[1].lower()).replace(" ", "-")
        inside = text if language is not None else text.removeprefix("    ") if text.startswith("    ") else None
        if line.endswith("\\") and inside is not None:
            line = line[:-1] + inside.strip()
        elif inside is not None and _in_quotes(line):
            line += f"\n{inside}"
        elif line and (inside is None or fence or inside.startswith("$ ") or language == "sh"):
            yield Shown(document, section, at, line, tuple(said), block)
            line = ""
        elif line:
            said.append(inside)
        if not line and inside is not None and not fence and (inside.startswith("$ ") or (language == "sh" and inside)):
            at, line, said, block = number, inside.removeprefix("$ "), [], language


def section(document: Path, heading: str) -> str:
    """The text of a document below the `##` heading of that name, up to the next one."""
    (found,) = re.findall(
        rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", document.read_text(), re.MULTILINE | re.DOTALL
    )
    return str(found)


def _in_quotes(line: str) -> bool:
    """Whether a quote that begins in a line does not end there."""
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return True
    return False


def llmc_calls(line: str) -> Iterator[tuple[dict[str, str], list[str]]]:
    """The variables that each call of llmc in a line for a shell is given, and its arguments."""
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    call: list[str] = []
    redirected = False
    for word in [*words, ";"]:
        if _OPERATOR.fullmatch(word) is None:
            call += [] if redirected else [word]
            redirected = False
        elif "<" in word or ">" in word:
            redirected = True
        else:
            given: dict[str, str] = {}
            while call and _ASSIGNMENT.match(call[0]):
                name, _, given[name] = call.pop(0).partition("=")
            if call[:1] == ["llmc"]:
                yield given, call[1:]
            call = []


def llmc_arguments(line: str) -> Iterator[list[str]]:
    """The arguments of each call of llmc in a line for a shell."""
    return (arguments for _, arguments in llmc_calls(line))
