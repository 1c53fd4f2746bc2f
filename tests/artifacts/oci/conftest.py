"""Registries on loopback: a real one, and one that misbehaves."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.oci import push_image
from llmc.artifacts.store.store import Store
from tests.artifacts.oci.helpers import make_bundle
from tests.artifacts.oci.server import Server
from tests.timing import PATIENCE_S

BINARY = shutil.which("docker-registry")

StartRegistry = Callable[..., int]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.fixture(scope="session")
def start_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartRegistry]:
    """Starts registries, each with an own folder: given the section "http" and others; returns their ports."""
    if BINARY is None:
        pytest.skip("no docker-registry: apt-get install docker-registry")
    started: list[subprocess.Popen[bytes]] = []

    def start(http: dict[str, Any], **more: Any) -> int:
        folder = tmp_path_factory.mktemp("registry")
        port = free_port()
        config = {
            "version": 0.1, "log": {"level": "error", "accesslog": {"disabled": True}},
            "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
            "http": {"addr": f"127.0.0.1:{port}", **http}, **more,
        }  # fmt: skip
        (folder / "config.yml").write_text(json.dumps(config))
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen([str(BINARY), "serve", str(folder / "config.yml")], stdout=log, stderr=log)
        started.append(process)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return port
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.05)

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder that knows no account."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.fixture
def server(tmp_path: Path, store: Store) -> Iterator[Server]:
    """Serves a bundle."""
    push_image(store, make_bundle(store), f"oci-layout:{tmp_path / 'images'}:v1")
    server = Server(tmp_path / "images")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="session")
def registry_port(start_registry: StartRegistry) -> int:
    return start_registry({})


@pytest.fixture
def account(start_registry: StartRegistry, tmp_path: Path) -> int:
    """The port of a registry that wants a password."""
    hashed = "$2b$04$MJKrO5Bc298ZcacSQ2L/V.UDLsHUN1CBQoFeWVEkkzJSmMNh27XHe"
    (tmp_path / "htpasswd").write_text(f"me:{hashed}\n")
    auth = {"htpasswd": {"realm": "here", "path": str(tmp_path / "htpasswd")}}
    return start_registry({}, auth=auth)
