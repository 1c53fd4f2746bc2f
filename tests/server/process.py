"""`llmc serve` as a process of its own, watched by its JSON lines."""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.artifacts.helpers import REPO
from tests.server.live import completion
from tests.timing import PATIENCE_S

STARTS_S = 180.0
"""A process imports torch, opens a bundle and captures graphs before it is ready, beside another worker's tests."""
RUN = "import sys\nfrom llmc.cli.main import main\nsys.exit(main())"
HANGS_UP = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"
"""What runs the tests may have been told by nohup to ignore SIGHUP, and its children with it."""


class Process:
    """Runs `llmc serve … --json`; `before` is Python that runs first, to make something go wrong."""

    starts_s = STARTS_S

    def __init__(self, cache: Path, *arguments: object, before: str = "") -> None:
        code = f"{HANGS_UP}\n{textwrap.dedent(before)}\n{RUN}"
        command = [sys.executable, "-c", code, "serve", *map(str, arguments), "--json"]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("LLMC_", "VLLM_"))}
        self.child = subprocess.Popen(
            command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**clean, "LLMC_CACHE_DIR": str(cache)},
        )  # fmt: skip
        self._events: queue.Queue[Any] = queue.Queue()
        self._errors: list[str] = []
        self._written = threading.Condition()
        self._ended = False
        self._readers = [threading.Thread(target=read) for read in (self._read_events, self._read_errors)]
        for reader in self._readers:
            reader.start()
        self.port = 0

    def _read_events(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self._events.put(json.loads(line))
        self._events.put(None)

    def _read_errors(self) -> None:
        """Read all the time: a process that writes more than a pipe holds would wait for its reader."""
        assert self.child.stderr is not None
        for line in self.child.stderr:
            with self._written:
                self._errors.append(line)
                self._written.notify_all()
        with self._written:
            self._ended = True
            self._written.notify_all()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.child.kill()
        self.child.wait(PATIENCE_S)
        for reader in self._readers:
            reader.join()
        assert self.child.stdout is not None and self.child.stderr is not None
        self.child.stdout.close()
        self.child.stderr.close()

    def wait(self, event: str) -> dict[str, Any]:
        """The next event, which has to be this one."""
        try:
            found = self._events.get(timeout=self.starts_s)
        except queue.Empty:
            raise AssertionError(f"no {event!r} within {self.starts_s:g} s: {self.errors}") from None
        if found is None:
            raise AssertionError(f"ended without {event!r}: {self.ended()[1]}")
        assert found["event"] == event, found
        if event == "listening" and not found["url"].startswith("unix:"):
            self.port = int(found["url"].rpartition(":")[2])
        return dict(found)

    def ready(self) -> Process:
        """Wait until it serves."""
        self.wait("listening")
        self.wait("ready")
        return self

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                return response.status, json.loads(response.read())
        finally:
            connection.close()

    def complete(self, **body: Any) -> tuple[int, Any]:
        return self.ask("POST", "/v1/completions", completion(**body))

    def signal(self, signum: int = signal.SIGTERM) -> None:
        self.child.send_signal(signum)

    def ended(self) -> tuple[int, str]:
        """Exit code and standard error, once it has ended."""
        code = self.child.wait(PATIENCE_S)
        self._readers[1].join(PATIENCE_S)
        return code, self.errors

    @property
    def errors(self) -> str:
        """Standard error, as far as it is written."""
        with self._written:
            return "".join(self._errors)

    def reports(self, text: str) -> None:
        """Wait until standard error has the text."""
        with self._written:
            self._written.wait_for(lambda: self._ended or text in "".join(self._errors), self.starts_s)
        assert text in self.errors, self.errors
