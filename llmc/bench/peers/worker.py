"""An engine in a process of its own: started, asked, measured from outside, ended."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Any, Literal

from llmc.errors import LlmcError
from llmc.waiting import of_others

ENGINES = Path(__file__).parent / "engines"
LOG_TAIL = 300
"""Characters of an engine's log that an error shows."""
POLL_S = 0.05
"""Seconds between two looks at a process's memory."""


class EngineError(LlmcError):
    """An engine failed at a request, or ended; the message says which, with the engine's output."""


@dataclass(frozen=True)
class Contender:
    """What is compared: an engine (a file of engines/) over a model, in `python`.

    `kind`: a bundle of llmc, or a peer. `bits` of a weight, nominally; None where it is not known. `versions` of what
    it runs on. `variant` is the peer's, or how a bundle was quantised. `searched`: options of the engine that tuning.py
    chooses a value for.
    """

    name: str
    kind: Literal["llmc", "peer"]
    engine: str
    python: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    bits: float | None = None
    variant: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    searched: Mapping[str, Sequence[Any]] = field(default_factory=dict)


class Worker:
    """One contender's process, with `threads` threads; `more` are options of this opening alone.

    What the engine prints goes to `log`. Raises EngineError where it does not open.
    """

    def __init__(self, contender: Contender, threads: int, log: Path, **more: Any) -> None:
        self.contender, self.log = contender, log
        self._log = log.open("a")
        self.process = start(contender, threads, self._log, **more)
        try:
            self._answer("open")
        except BaseException as error:
            self.close(at_once=not isinstance(error, Exception))
            raise

    @property
    def name(self) -> str:
        """The contender's."""
        return self.contender.name

    def ask(self, op: str, **args: Any) -> dict[str, Any]:
        """The answer of a method of the engine; raises EngineError."""
        self._send(op, args)
        return self._answer(op)

    def ask_with_memory(self, op: str, **args: Any) -> tuple[dict[str, Any], int]:
        """The answer, and the most memory (PSS, bytes) that the process held meanwhile, seen every POLL_S seconds."""
        done, most = Event(), [self.pss()]

        def look() -> None:
            while not done.wait(POLL_S):
                most.append(self.pss())

        watcher = Thread(target=look)
        watcher.start()
        try:
            answer = self.ask(op, **args)
        finally:
            done.set()
            watcher.join()
        return answer, max([*most, self.pss()])

    def pss(self) -> int:
        """Bytes of the process's proportional set size now: shared pages count by their share."""
        try:
            lines = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:
            return 0
        return int(dict(line.split(":") for line in lines)["Pss"].split()[0]) * 1024

    def _send(self, op: str, args: Mapping[str, Any]) -> None:
        if self.process.stdin is None or self.process.poll() is not None:
            raise EngineError(f"{self.name} has ended: {self._said()}")
        try:
            self.process.stdin.write(json.dumps({"op": op, "args": args}) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise EngineError(f"{self.name} has ended: {self._said()}") from error

    def _answer(self, op: str) -> dict[str, Any]:
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise EngineError(f"{self.name} ended in {op} with exit code {self.process.wait()}: {self._said()}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{self.name}: {op}: {answer['error']}")
        return dict(answer["ok"])

    def _said(self) -> str:
        self._log.flush()
        said = " ".join(self.log.read_text(errors="replace")[-LOG_TAIL:].split())
        return f"…{said} (all of it in {self.log})"

    def close(self, *, at_once: bool = False) -> None:
        """End the process by ending its input; `at_once`, without waiting for what it does."""
        if at_once:
            self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close(at_once=error is not None and not isinstance(error, Exception))


def start(contender: Contender, threads: int, log: Any, **more: Any) -> subprocess.Popen[str]:
    """The engine's process, before it has answered anything. A terminal's Ctrl-C reaches only who started it."""
    options = {"model": contender.model, "threads": threads, **contender.options, **more}
    command = [
        contender.python or sys.executable, str(ENGINES / "launch.py"), str(ENGINES / f"{contender.engine}.py"),
        json.dumps(options),
    ]  # fmt: skip
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, process_group=0, env=of_others()
    )


def first_token(contender: Contender, threads: int, question: str, log: Path, **more: Any) -> float:
    """Seconds from starting a process to the first text of its answer; raises EngineError."""
    began = time.perf_counter()
    with Worker(contender, threads, log, **more) as worker:
        answer = worker.ask("first_token", question=question)
        took = time.perf_counter() - began - float(answer.get("after_s", 0.0))
    if not answer["text"]:
        raise EngineError(f"{contender.name}: first_token: no text came")
    return took
