"""A local Ray cluster of several nodes, and the device "farmed", which another package brings to each of them.

Its compiler does once what the folder FARMED asks for by a file: `die` (the worker is killed), `wait` (it takes
ten minutes). FARMED_VERSION is a node's toolchain, FARMED_LACKS what it lacks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

SOURCE = """
from dataclasses import replace
import os, signal, time
from pathlib import Path
from llmc.compiler.targets.fake import FakeTarget


class Farmed(FakeTarget):
    description = replace(FakeTarget.description, name="farmed")

    def toolchain(self):
        return {**super().toolchain(), "farmed": os.environ.get("FARMED_VERSION", "1")}

    def lacks(self):
        return os.environ.get("FARMED_LACKS", "")

    def compile(self, lowered, shape, options):
        for name in ("die", "wait"):
            try:
                (Path(os.environ["FARMED"]) / name).unlink()
            except FileNotFoundError:
                continue
            if name == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        return super().compile(lowered, shape, options)
"""
MEMORY = 80 << 20
"""Of a node's object store: the least that Ray takes."""
RAY = {"RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0"}
"""Ray's own settings. By default its workers have niceness 15, and hardly start beside busy tests. By default it also
kills them when the host's memory is short, which other tests can cause."""


def install(folder: Path) -> Path:
    """The package, as an installer leaves it."""
    (folder / "farmed.py").write_text(SOURCE)
    about = folder / "farmed-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: farmed\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[llmc.targets]\nfarmed = farmed:Farmed\n")
    return folder


def own_ports() -> dict[str, str]:
    """Variables for the ports of HAProxy and of replicas, which two clusters on a host must not share.

    No system gives these ports out by itself.
    """
    first = 27000 + 300 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    names = ("HAPROXY_METRICS", "HAPROXY_STATS", "FALLBACK_PROXY_HTTP", "FALLBACK_PROXY_GRPC")
    single = {f"{name}_PORT": first + index for index, name in enumerate(names)}
    replica = {
        f"DIRECT_INGRESS_{end}_{what}_PORT": first + after + (end == "MAX") * 99
        for after, what in ((100, "HTTP"), (200, "GRPC"))
        for end in ("MIN", "MAX")
    }
    return {f"RAY_SERVE_{name}": str(port) for name, port in {**single, **replica}.items()}


class Farm:
    """A cluster of two nodes of one CPU; `farmed` is the folder of wishes."""

    _shared: ClassVar[Farm | None] = None
    _users: ClassVar[int] = 0

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        self.farmed, self._ports = folder, own_ports()
        self._leave: Callable[[], None] = lambda: None
        self._cluster = Cluster()
        self.add(include_dashboard=False)
        self.add()
        self.address: str = self._cluster.address

    def take(self, leave: Callable[[], None] = lambda: None) -> Farm:
        """Have the cluster alone: calls its last user's `leave`, and keeps `leave` for the next user."""
        self._leave()
        self._leave = leave
        return self

    def add(self, labels: dict[str, str] | None = None, first: Path | None = None, **options: Any) -> Any:
        """A node of one CPU; FARMED_… are its environment's, and its modules are looked up in `first` first."""
        reported = {name: options.pop(name) for name in list(options) if name.startswith("FARMED")}
        path = os.pathsep.join(map(str, filter(None, [first, self.farmed, *sys.path])))
        environment = {"FARMED": str(self.farmed), "PYTHONPATH": path, **RAY, **self._ports, **reported}
        return self._cluster.add_node(
            num_cpus=1, object_store_memory=MEMORY, env_vars=environment, labels=labels or {}, **options
        )

    @contextmanager
    def node(self, **options: Any) -> Iterator[Any]:
        """One more node, for a while."""
        node = self.add(**options)
        try:
            self._cluster.wait_for_nodes()
            yield node
        finally:
            self._cluster.remove_node(node)

    @classmethod
    @contextmanager
    def shared(cls, folders: pytest.TempPathFactory) -> Iterator[Farm]:
        """The only one of this process, which ends with its last user; without Ray the test is skipped."""
        pytest.importorskip("ray")
        cls._shared = farm = cls._shared or cls(install(folders.mktemp("farmed")))
        cls._users += 1
        try:
            yield farm
        finally:
            cls._users -= 1
            if not cls._users:
                cls._shared = None
                farm._cluster.shutdown()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    """Kept until the session ends."""
    with Farm.shared(tmp_path_factory) as farm:
        yield farm
