"""Runs what a page shows, in one folder, as its reader does, and compares what is printed with what the page says.

`python -m tests.docs.running PAGE FOLDER` runs a page and prints each command with its whole output, to write it by.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from tests.docs.commands import ROOT, Shown, shown
from tests.server.over_ray import free_port

PROGRAMS = {"cat", "curl", "echo", "grep", "head", "llmc", "ls"}
"""What is run; other lines, as of kubectl, need what is not here. Blocks of "sh" are not run."""

PORT = "8000"
"""The port of a page's server, in whose place a free one is taken."""

_PIECE = re.compile(r"(?P<number>\d[\d.,:e+-]*)(?P<unit> ?(?:[KMG]i?B|µs|ms|s|min|h)\b)?|(?P<rest>…)|(?P<space>\s+)")


class Page:
    """A page whose commands run in `folder`/here, with the store `cache`."""

    def __init__(self, document: Path, folder: Path, cache: Path) -> None:
        self.document = document
        self.folder = folder / "here"
        self.folder.mkdir(parents=True, exist_ok=True)
        programs = folder / "bin"
        programs.mkdir(exist_ok=True)
        (programs / "llmc").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m llmc "$@"\n')
        (programs / "llmc").chmod(0o755)
        self.port = str(free_port())
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "LLMC_"))}
        self.environment = {
            **kept, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "COLUMNS": "200",
            "LLMC_CACHE_DIR": str(cache),
        }  # fmt: skip

    def run(self) -> Iterator[tuple[Shown, str]]:
        """Each command that was run, and what it printed; raises AssertionError for one that failed."""
        with ExitStack() as running:
            for one in shown(self.document):
                line = re.sub(rf"\b{PORT}\b", self.port, one.line)
                if one.language == "sh":
                    continue
                if line.startswith("llmc serve "):
                    yield one, running.enter_context(self._served(line))
                elif line.split()[0] in PROGRAMS:
                    done = self._start(line)
                    said = done.communicate(timeout=1200)[0].replace(self.port, PORT)
                    assert done.returncode == 0, f"{self.document.name}, line {one.at}: {one.line}\n{said}"
                    yield one, said

    def _start(self, line: str, into: int | IO[str] = subprocess.PIPE) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-ec", line], cwd=self.folder, env=self.environment, text=True, stdin=subprocess.DEVNULL,
            stdout=into, stderr=subprocess.STDOUT,
        )  # fmt: skip

    @contextmanager
    def _served(self, line: str) -> Iterator[str]:
        """A server, from when it is ready; what it printed until then."""
        log = self.folder.parent / "served"
        with log.open("w") as into, self._start(f"exec {line}", into) as server:
            try:
                end = time.monotonic() + 120
                while not _is_ready(f"http://127.0.0.1:{self.port}/ready"):
                    assert server.poll() is None and time.monotonic() < end, f"{line}: {log.read_text()}"
                    time.sleep(0.2)
                yield log.read_text().replace(self.port, PORT)
            finally:
                server.terminate()
                server.wait(timeout=60)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def runs(page: Page) -> list[str]:
    """The commands of a page; raises AssertionError for one that failed, or did not print what the page says."""
    commands = []
    for one, printed in page.run():
        line = missing(one.said, printed)
        assert line is None, f"{page.document}, line {one.at}: {one.line}\nsays\n{line}\nbut it printed\n{printed}"
        commands.append(one.line)
    return commands


def missing(said: tuple[str, ...], printed: str) -> str | None:
    """The first line that a page says and that was not printed behind those before it; None: all were.

    Numbers, their units and the width of spaces may differ; … stands for anything, on a line alone for any lines.
    """
    lines = iter(printed.splitlines())
    for line in said:
        if line.strip() in ("", "…"):
            continue
        wanted = re.compile(_pattern(line.strip()))
        if not any(wanted.fullmatch(one.strip()) for one in lines):
            return line
    return None


def _pattern(line: str) -> str:
    built, at = "", 0
    for piece in _PIECE.finditer(line):
        built += re.escape(line[at : piece.start()])
        at = piece.end()
        if piece["number"]:
            built += r"\d[\d.,:e+-]*" + (r" ?\w+" if piece["unit"] else "")
        else:
            built += ".*" if piece["rest"] else r"\s+"
    return built + re.escape(line[at:])


if __name__ == "__main__":
    for command, output in Page(Path(sys.argv[1]), folder := Path(sys.argv[2]), folder / "cache").run():
        print(f"$ {command.line}\n{output}", flush=True)
