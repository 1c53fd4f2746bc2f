"""Sockets: free ports, what cannot be bound, and Unix sockets that outlive a kill."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from llmc.errors import InputError
from llmc.server.listening import Listener, listen, listen_unix
from tests.server.live import Live, toy_bundle


def test_port_0_takes_a_free_port_and_says_which() -> None:
    first, second = listen("127.0.0.1", 0), listen("127.0.0.1", 0)
    ports = {int(x.url.removeprefix("http://127.0.0.1:")) for x in (first, second)}
    assert len(ports) == 2 and 0 not in ports
    first.close()
    second.close()


def test_a_port_in_use_is_named() -> None:
    taken = listen("127.0.0.1", 0)
    port = int(taken.url.rpartition(":")[2])
    with pytest.raises(InputError, match=rf"^port {port} of 127.0.0.1 is in use; give another one with --port"):
        listen("127.0.0.1", port)
    taken.close()
    listen("127.0.0.1", port).close()


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("127.0.0.1", 65536, "--port 65536 is not a port: use 1"),
        ("127.0.0.1", -1, "--port -1 is not a port"),
        ("192.0.2.1", 0, "192.0.2.1:0 cannot be bound: Cannot assign requested address; give an address of this host"),
        ("no such host.invalid", 0, "cannot be bound"),
        ("a" * 70 + ".invalid", 0, "cannot be bound"),
    ],
)
def test_what_cannot_be_bound_says_why(host: str, port: int, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        listen(host, port)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False),
        pytest.param("::1", True, marks=pytest.mark.full), pytest.param("::", False, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_who_can_reach_it(host: str, local: bool) -> None:
    try:
        bound = listen(host, 0)
    except InputError as e:
        if ":" not in host:
            raise
        pytest.skip(f"no IPv6 here: {e}")
    assert bound.local is local
    assert bound.url.startswith(f"http://[{host}]:" if ":" in host else f"http://{host}:")
    bound.close()


def test_the_server_answers_on_a_unix_socket_and_takes_its_file_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "llmc.sock"
    with Live(toy_bundle(tmp_path), listener=listen_unix(path)) as live:
        live.ready()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
    assert not path.exists()


def test_the_file_of_a_server_that_was_killed_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "llmc.sock"
    killed = listen_unix(path)
    killed.socket.close()
    assert path.exists()
    listen_unix(path).close()
    assert not path.exists()


def test_the_socket_of_a_server_that_runs_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "llmc.sock"
    running = listen_unix(path)
    with pytest.raises(InputError, match="another server listens there; give another path"):
        listen_unix(path)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
    running.close()


def test_a_file_in_the_way_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(InputError, match="cannot be bound"):
        listen_unix(path)
    assert path.read_text() == "mine"


def test_a_closed_listener_leaves_a_replaced_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "gone.sock"
    listener: Listener = listen_unix(path)
    path.unlink()
    listener.close()
