"""One bundle, served in each way that there is: by one process, by two behind one port, and by a replica over Ray."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import httpx
import pytest

from llmc.cpus import usable_cpus
from tests.farm import Farm
from tests.server.live import completion
from tests.server.over_ray import OverRay
from tests.server.process import Process
from tests.server.stub_engine import Asks
from tests.toy import Toy

OWN_WAYS = ("process", "replicas")
"""Those in which llmc's own HTTP answers: Ray's ingress differs in what docs/deploying.md lists."""
WAYS = (*OWN_WAYS, pytest.param("ray", marks=pytest.mark.full))
KEYS = ("first-key", "clé-ñ-鍵")
MODEL = "org/toy"
PATIENCE_S = 60.0
SILENCE_S = 1.0


class Served(Asks):
    """A running server; `key` is sent with each request."""

    def __init__(self, port: int, key: str | None = KEYS[0]) -> None:
        self.port = port
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=PATIENCE_S, limits=httpx.Limits()
        )

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self._client.request(method, path, **options)

    @cached_property
    def without_key(self) -> Served:
        """The same, to clients that send none of their own accord."""
        return Served(self.port, None)

    @contextmanager
    def stream(self, **body: Any) -> Iterator[httpx.Response]:
        """The answer to a completion, of which the first event has been read."""
        requested = completion(stream=True, **body)
        with self._client.stream("POST", "/v1/completions", json=requested) as answer:
            assert answer.status_code == 200
            assert next(answer.iter_lines()).startswith("data: {")
            yield answer

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have the labels."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith(f"llmc:{name}{{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines if all(one in line for one in wanted))

    def say(self, sent: bytes) -> bytes:
        """What is answered to bytes on a connection of their own, until the server closes it, or waits for more."""
        said = b""
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE_S) as connection:
            try:
                connection.sendall(sent)
                while part := connection.recv(1 << 16):
                    said += part
                    connection.settimeout(SILENCE_S)
            except (BrokenPipeError, ConnectionResetError):
                pass  # it was refused before all was sent
            except TimeoutError:
                assert said
        return said

    def close(self) -> None:
        self.without_key._client.close()
        self._client.close()


class Ways:
    """Servers of `toy`'s bundle, each started when it is first asked for and kept until all are closed.

    The one over Ray ends earlier if other tests want the cluster; the next test that asks for it starts it again.
    """

    def __init__(self, toy: Toy, folders: pytest.TempPathFactory) -> None:
        self.toy, self._folders, self._folder = toy, folders, folders.mktemp("ways")
        self._closing = ExitStack()
        self._served: dict[str, Served] = {}
        self._failed: dict[str, str] = {}

    def __getitem__(self, way: str) -> Served:
        if way == "ray":
            pytest.importorskip("ray")
        if way == "replicas" and usable_cpus() < 2:
            pytest.skip("replicas need a CPU each, and this host gives one")
        assert way not in self._failed, f"it did not start for an earlier test: {self._failed[way]}"
        if way not in self._served:
            try:
                self._served[way] = Served(self._start(way).ready().port)
            except Exception as error:
                self._failed[way] = str(error)
                raise
            self._closing.callback(self._served[way].close)
        return self._served[way]

    def _start(self, way: str) -> Process:
        keys = [word for key in KEYS for word in ("--api-key", key)]
        given = (self._folder / way, self.toy.bundle, *keys, "--served-model-name", MODEL)
        if way == "ray":
            farm = self._closing.enter_context(Farm.shared(self._folders))
            server = OverRay(farm.take(lambda: self._leave(server)).address, *given)
            return self._closing.enter_context(server)
        replicas = ("--replicas", 2) if way == "replicas" else ()
        return self._closing.enter_context(Process(*given, "--port", 0, *replicas))

    def _leave(self, server: Process) -> None:
        """End the server over Ray, and what it runs in the cluster."""
        self._served.pop("ray", None)
        server.signal()
        server.child.wait(server.starts_s)

    def close(self) -> None:
        self._closing.close()
