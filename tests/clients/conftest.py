"""Today's clients of OpenAI's API, in the environment of `make clients`, against a live server on this machine."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests.clients.server import QUESTION, PlainServer, ScriptedServer, serve
from tests.runtime.text import notations
from tests.tiers import require_mark

FAMILIES = {
    "hermes": notations.HERMES, "llama": notations.LLAMA, "mistral": notations.NAMED, "tags": notations.TAGS,
    "python": notations.PYTHON,
}  # fmt: skip
"""Chat templates by the family of models whose notation of tool calls they have."""
ANSWERS_WITHIN = 120
"""Seconds in which a case ends, at most; the first case of a client includes the imports."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    require_mark(items, Path(__file__).parent, "real_client")


@dataclass(frozen=True)
class Said:
    """What a client returned; see programs/worker.py."""

    text: str
    chunks: list[str]
    usage: list[int] | None
    calls: list[list[Any]]
    value: Any


class Client:
    """A client's program in its own environment; `log` has what it prints."""

    def __init__(self, python: Path, name: str, folder: Path) -> None:
        self.log = folder / "log"
        program = Path(__file__).parent / "programs" / f"use_{name}.py"
        variables = {
            "HOME": str(folder), "NO_PROXY": "*", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
            "LANGSMITH_TRACING": "false", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1",
        }  # fmt: skip
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        with self.log.open("w") as log:
            self._child = subprocess.Popen(
                [str(python), str(program)], env={**kept, **variables}, cwd=folder, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._lines.put(line)
        self._lines.put("")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._child.kill()
        self._child.wait()
        self._reader.join()
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.close()
        self._child.stdout.close()

    def __call__(
        self, case: str, server: ScriptedServer | PlainServer, parameter: str = "", question: str = QUESTION
    ) -> Said:
        """Run a case of the program against a server; fails with the client's own traceback."""
        assert self._child.stdin is not None
        server.begin()
        print(
            json.dumps({"case": case, "server": [server.url, server.model, question, parameter]}),
            file=self._child.stdin,
        )
        self._child.stdin.flush()
        answer = self._lines.get(timeout=ANSWERS_WITHIN)
        assert answer, self.log.read_text(errors="replace")[-4000:]
        found = json.loads(answer)
        assert "error" not in found, found["error"]
        assert not server.faults, server.faults
        return Said(**found["said"])


@pytest.fixture(scope="session")
def clients(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Client]]:
    """Clients by name, each started once."""
    python = request.config.getoption("--other-python")
    if python is None:
        raise pytest.UsageError("name the clients' Python with --other-python (make clients)")
    started: dict[str, Client] = {}

    def client(name: str) -> Client:
        if name not in started:
            started[name] = Client(python.absolute(), name, tmp_path_factory.mktemp(name))
        return started[name]

    yield client
    for one in started.values():
        one.__exit__(None, None, None)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ScriptedServer]]:
    """Servers by their template's family, each started once."""
    started: dict[str, ScriptedServer] = {}

    def server(family: str) -> ScriptedServer:
        if family not in started:
            started[family] = serve(FAMILIES[family], tmp_path_factory.mktemp(family))
        return started[family]

    yield server
    for one in started.values():
        one.close()


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainServer]:
    """A server whose toy model answers."""
    server = PlainServer(tmp_path_factory.mktemp("plain"))
    yield server
    server.close()
