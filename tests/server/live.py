"""A server on a real socket, in a thread of the test, over the toy bundle; and a gate before its executor's steps."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import pytest

from llmc.runtime.startup.capturing import CaptureChoice
from llmc.runtime.startup.opening import EngineOptions
from llmc.runtime.step import Step
from llmc.server.events import Event, Listening, Ready
from llmc.server.lifecycle import Server
from llmc.server.listening import Listener, listen
from llmc.server.loading import How, OpenBundle, WarmUp
from llmc.server.state import ServerConfig
from tests.devices import use, watching
from tests.timing import PATIENCE_S
from tests.toy import Toy

E = TypeVar("E", bound=Event)


def toy_bundle(folder: Path, **options: Any) -> Path:
    """A bundle of 4 sequences of 32 tokens, by default with one executable for every shape."""
    toy = Toy.make(folder)
    toy.compile(**options)
    return toy.bundle


class Gate:
    """Stands before every step of the fake executor. Open at first; `hold` lets steps through as `let` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[Step] = []
        self._changed = threading.Condition()
        self._allowed = math.inf
        self._error: Exception | None = None
        self.executor = watching(self._pass)
        use(monkeypatch, executor=self.executor)

    def _pass(self, step: Step) -> None:
        with self._changed:
            self.steps.append(step)
            location = len(self.steps)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or location <= self._allowed)
            if self._error is not None:
                raise self._error

    def hold(self) -> None:
        """Let no further step through."""
        with self._changed:
            self._allowed = len(self.steps)

    def let(self, steps: float = math.inf) -> None:
        """Let as many more steps through."""
        with self._changed:
            self._allowed += steps
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Raise `error` in the step that waits, and in each later one."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait(self, steps: int) -> None:
        """Until so many steps have come to the gate."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.steps) >= steps, PATIENCE_S), len(self.steps)


class Answer(NamedTuple):
    """Status, headers (lower case) and text."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def chunks(self) -> list[Any]:
        """The events of a stream but [DONE]."""
        found = [line.removeprefix("data: ") for line in self.text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in found if line != "[DONE]"]


class Live:
    """A running server. Leaving it stops it at once, cutting what still runs."""

    def __init__(
        self, open_bundle: Path | OpenBundle, *, options: EngineOptions | None = None, listener: Listener | None = None,
        warm_up: How = "all", uses: Any = None, capture: CaptureChoice | None = None, observers: tuple[Any, ...] = (),
        cache_counters: Callable[[], dict[str, int]] | None = None, loaded: Callable[[], None] = lambda: None,
        reopen: Callable[..., Any] | None = None, **config: Any,
    ) -> None:  # fmt: skip
        opener = (lambda on_progress: open_bundle) if isinstance(open_bundle, Path) else open_bundle
        self.events: list[Event] = []
        self.error: BaseException | None = None
        self._news = threading.Condition()
        self.server = Server(
            ServerConfig(**{"shutdown_timeout_s": 5.0, "warm_aside": False, **config}),
            listener or listen("127.0.0.1", 0), opener, options or EngineOptions(),
            warm_up=WarmUp(warm_up, uses, capture or CaptureChoice()), report=self._report, observers=observers,
            cache_counters=cache_counters, loaded=loaded, reopen=reopen,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, name="live")

    def __enter__(self) -> Live:
        self._thread.start()
        self.wait(Listening)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.server.stop()
        self.server.stop()
        self.join()

    def ready(self) -> Live:
        """Wait for it."""
        self.wait(Ready)
        return self

    def join(self) -> None:
        """Wait until it has stopped."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            asyncio.run(self.server.run())
        except BaseException as e:  # noqa: BLE001 - the test looks at it
            self.error = e
        with self._news:
            self._news.notify_all()

    def _report(self, event: Event) -> None:
        with self._news:
            self.events.append(event)
            self._news.notify_all()

    def wait(self, kind: type[E], that: Callable[[E], bool] = lambda _: True) -> E:
        """The first event of a kind `that` is so."""

        def found() -> Any:
            return next((e for e in self.events if isinstance(e, kind) and that(e)), None) or self.error

        with self._news:
            assert self._news.wait_for(found, PATIENCE_S), self.events
            event = found()
        assert isinstance(event, kind), event
        return event

    @property
    def port(self) -> int:
        return int(self.server.listener.url.rpartition(":")[2])

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json", **headers})
            with connection.getresponse() as r:
                return Answer(r.status, {k.lower(): v for k, v in r.getheaders()}, r.read().decode())
        finally:
            connection.close()

    def get(self, path: str) -> Answer:
        return self.ask("GET", path)

    def complete(self, **body: Any) -> Answer:
        """A completion of 4 tokens, if not told otherwise."""
        return self.ask("POST", "/v1/completions", completion(**body))

    def call(self, **body: Any) -> Call:
        """The same, in a thread."""
        return Call(lambda: self.complete(**body))

    def begin(self, **body: Any) -> socket.socket:
        """Send the same, and return the connection."""
        data = json.dumps(completion(**body)).encode()
        connection = self.connect()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
        )
        connection.sendall(head.encode() + b"\r\n\r\n" + data)
        return connection

    @property
    def stats(self) -> Any:
        assert self.server.state.served is not None
        return self.server.state.served.engine.stats

    def gauge(self, name: str) -> float:
        """A sample of /metrics."""
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith(f"llmc:{name}{{")]
        return float(lines[0].rpartition(" ")[2])


class Call:
    """A request that is under way in a thread."""

    def __init__(self, ask: Callable[[], Answer]) -> None:
        self._answer: Answer | BaseException | None = None

        def run() -> None:
            try:
                self._answer = ask()
            except Exception as e:  # noqa: BLE001 - handed on
                self._answer = e

        self._thread = threading.Thread(target=run)
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    @property
    def answer(self) -> Answer:
        self._thread.join(PATIENCE_S)
        assert isinstance(self._answer, Answer), self._answer
        return self._answer


def completion(**body: Any) -> dict[str, Any]:
    return {"prompt": "abcd", "max_tokens": 4, "temperature": 0, "ignore_eos": True, **body}
