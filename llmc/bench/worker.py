"""An engine in its own process: start it, send it requests, measure it from outside, end it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Any, Self

from llmc.errors import LlmcError
from llmc.waiting import of_others

LAUNCH = Path(__file__).with_name("launch.py")
LOG_TAIL = 300
"""Characters of an engine's log that an error quotes."""
POLL_S = 0.05
"""Seconds between two memory readings."""


class EngineError(LlmcError):
    """An engine failed at a request or ended; the message quotes the engine's output."""


class Worker:
    """The process of engine `name`, started as `command` at `began` (time.perf_counter()); its output goes to `log`.

    A terminal's Ctrl-C does not reach it. Raises EngineError if the engine does not open.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name, self.log = name, log
        self._log = log.open("a")
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, process_group=0,
            env=of_others(),
        )  # fmt: skip
        try:
            self._answer("open")
        except BaseException as error:
            self.close(at_once=not isinstance(error, Exception))
            raise

    def ask(self, op: str, **args: Any) -> dict[str, Any]:
        """Call a method of the engine and return its answer. Raises EngineError."""
        self._send(op, args)
        return self._answer(op)

    def ask_with_memory(self, op: str, **args: Any) -> tuple[dict[str, Any], int]:
        """Call `ask` and also return the process's peak memory (PSS, bytes), read every POLL_S seconds."""
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

    def first_token(self, question: str) -> float:
        """Time from process start to the first text of the answer, in seconds. Raises EngineError."""
        answer = self.ask("first_token", question=question)
        took = time.perf_counter() - self.began - float(answer.get("after_s", 0.0))
        if not answer["text"]:
            raise EngineError(f"{self.name}: first_token: the engine returned no text")
        return took

    def pss(self) -> int:
        """The process's proportional set size in bytes; shared pages count proportionally."""
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
        return f"…{said} (full log: {self.log})"

    def close(self, *, at_once: bool = False) -> None:
        """End the process by closing its input; `at_once` kills it instead of waiting."""
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close(at_once=error is not None and not isinstance(error, Exception))


def command(python: str, engine: Path, options: Mapping[str, Any]) -> list[str]:
    """The command that starts an engine file (launch.py) in `python` with its constructor's `options`."""
    return [python, str(LAUNCH), str(engine), json.dumps(options)]
