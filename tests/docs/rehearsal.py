"""Runs every call of llmc that a document or a section shows, in order and in one folder, as its reader would.

What a document names and none of its commands makes is brought by stand_ins.py, where it runs is told by scenes.py, and
what cannot run is named by exceptions.py. Pages whose output is compared, too, are run by running.py.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from urllib.request import Request, urlopen

import pytest

from llmc.cli.main import main
from tests.docs.commands import AND_SO_ON, Shown, llmc_calls
from tests.docs.exceptions import why_not
from tests.docs.running import missing
from tests.docs.scenes import SCENES, Scene
from tests.docs.stand_ins import BROUGHT, Kit
from tests.server.over_ray import free_port

STAYS = {"serve": "llmc: ready", "prefill": "llmc: ready", "loop": "requests"}
"""Processes that run until they are told to end, and what they print once they do their work."""
STARTS_S = 240.0
BRIEF = {"--requests": "4", "--for": "1s", "--prompt-len": "64"}
"""What else takes minutes, or more tokens than a tiny model has."""
SERVER = re.compile(r"(?<=://)(?:localhost|127\.0\.0\.1|host|prefill-host):\d+")
REGISTRY = re.compile(r"(?<=^oci://)[^/]+")
FOLDER = re.compile(r"(?<![\w/.])/(?=(?:cache|mnt|recipes|run)\b)")
"""Of the root, in whose place the document's folder is taken."""
_HEXADECIMAL = re.compile(r"\b[0-9a-f]{8,64}\b")
DIGEST = re.compile(r"\bsha256:([0-9a-f]{10})")


@dataclass
class Rehearsal:
    """A run of `lines` in `folder`; `name` is that of their scene, `registry` the port of one on this host."""

    name: str
    lines: Sequence[Shown]
    folder: Path
    kit: Kit
    patch: pytest.MonkeyPatch
    capfd: pytest.CaptureFixture[str]
    registry: int | None = None
    port: int = 0
    digests: dict[str, str] = field(default_factory=dict)

    def run(self) -> dict[str, str]:
        """What a call that did not end as the document says printed, by where it is."""
        failed = {}
        if self._scene.before is not None:
            self.digests.update(self._scene.before(self.kit, self.folder, self.patch) or {})
        with ExitStack() as running:
            for one in self.lines:
                if one.line.startswith("export "):
                    for name, _, value in (word.partition("=") for word in shlex.split(one.line)[1:]):
                        self._bring([value])
                        self.patch.setenv(name, self._here(value))
                for given, arguments in llmc_calls(one.line):
                    if why_not(one, arguments) is None:
                        said = self._call(one, given, arguments, running)
                        if said is not None:
                            failed[f"{one.document.name}:{one.at} llmc {shlex.join(arguments)}"] = said
        return failed

    @property
    def _scene(self) -> Scene:
        return SCENES.get(self.name, Scene())

    def _call(self, one: Shown, given: dict[str, str], arguments: list[str], running: ExitStack) -> str | None:
        line = shlex.join(arguments)
        if not self.port and any(map(SERVER.search, arguments)):
            self._bring(["bundle"])
            running.enter_context(self._stays(["serve", "bundle"]))
            running.enter_context(requested(self.port))
        words = [self._here(word) for word in self._whole(arguments)]
        for part, makers in self._scene.anew.items():
            if part in line:
                for name, maker in makers.items():
                    maker(self.kit, self.folder / name)
        self._bring(words)
        with self.patch.context() as patch:
            for name, value in given.items():
                patch.setenv(name, os.path.expandvars(self._here(value)))
            for part, host in self._scene.host.items():
                if part in line:
                    host(patch)
            patch.setattr(sys, "stdin", io.StringIO("Hello.\n"))
            stays = words[0] in STAYS and "--once" not in words and _error("\n".join(one.said)) is None
            code, said = running.enter_context(self._stays(words)) if stays else self._ends(words)
        for shown_, built in zip(DIGEST.findall("\n".join(one.said)), DIGEST.findall(said), strict=False):
            self.digests[shown_] = built
        error = _error("\n".join(one.said))
        as_said = code == 0 if error is None else code != 0 and missing((error,), _error(said) or "") is None
        return None if as_said else f"{code}\n{said}"

    def _bring(self, words: list[str]) -> None:
        """What a call names, but for what it makes."""
        makes = {"-o", "keygen"} - ({"-o"} if "--resume" in words else set())
        named = [word for before, word in zip(["", *words], words, strict=False) if before not in makes]
        self.kit.bring(self.folder, named, {**BROUGHT, **self._scene.brought})

    def _whole(self, arguments: list[str]) -> list[str]:
        if arguments[-1] == AND_SO_ON:
            arguments = [*arguments[:-1], *self._scene.rest[arguments[0]].split()]
        brief = zip(["", *arguments], arguments, strict=False)
        return [{**BRIEF, **self._scene.brief}.get(before, word) for before, word in brief]

    def _here(self, word: str) -> str:
        """A word as it is here: hosts, folders of the root, and digests that commands printed."""
        if word.startswith("0.0.0.0:"):
            self.port = free_port()
            return f"0.0.0.0:{self.port}"
        word = SERVER.sub(
            f"127.0.0.1:{self.port}", re.sub(r"^~(?=/)", str(self.folder), word.replace("HOST:PORT", "127.0.0.1:0"))
        )
        if self.registry is not None:
            word = REGISTRY.sub(f"127.0.0.1:{self.registry}", word)
        return self.digests.get(word, FOLDER.sub(f"{self.folder}/", word))

    def _ends(self, words: list[str]) -> tuple[int, str]:
        self.capfd.readouterr()
        code = main(words)
        return code, "".join(self.capfd.readouterr())

    @contextmanager
    def _stays(self, words: list[str]) -> Iterator[tuple[int, str]]:
        """A process that serves until the document's end: 0 and what it printed, once it is ready."""
        port = self.port
        if words[0] == "serve":
            port = free_port()
            words = [*words, "--port", str(port)]
            if not self.port or "--replicas" not in words:  # one server alone has all that later calls ask for
                self.port = port
        log = self.folder.parent / f"{words[0]}-{port}.log"
        with (
            log.open("w") as into,
            subprocess.Popen([sys.executable, "-m", "llmc", *words], stdout=into, stderr=subprocess.STDOUT) as process,
        ):
            end = time.monotonic() + STARTS_S
            while not (works := STAYS[words[0]] in log.read_text()) and process.poll() is None:
                if time.monotonic() > end:
                    break
                time.sleep(0.05)
            try:
                said = log.read_text()
                yield 0 if works and "failed to record" not in said else 1, said
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=60)


@contextmanager
def requested(port: int) -> Iterator[None]:
    """A server that none of a document's commands starts is asked, from here on, again and again."""
    over = Event()
    body = json.dumps({"prompt": "a " * 20, "max_tokens": 4, "ignore_eos": True}).encode()
    request = Request(f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"})

    def ask() -> None:
        while not over.wait(0.05):
            with suppress(OSError), urlopen(request, timeout=30) as answer:
                answer.read()

    thread = Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _error(text: str) -> str | None:
    """The error that a text ends with, on one line and without digests, which differ here; None: it has none."""
    _, error, said = text.partition("llmc: error:")
    return _HEXADECIMAL.sub("0", f"{error} {' '.join(said.split())}") if error else None
