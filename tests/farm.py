"""A local Ray cluster of several nodes, and the device "farmed", which another package brings to each of them.

Its compiler does once what the folder FARMED asks for by a file: `die` (the worker is killed), `wait` (it takes
ten minutes). FARMED_VERSION is a node's toolchain, FARMED_LACKS what it lacks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SOURCE = """
import os, signal, time
from pathlib import Path
from llmc.compiler.targets.fake import FakeTarget


class Farmed(FakeTarget):
    name = "farmed"

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


def install(folder: Path) -> Path:
    """The package, as an installer leaves it."""
    (folder / "farmed.py").write_text(SOURCE)
    about = folder / "farmed-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: farmed\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[llmc.targets]\nfarmed = farmed:Farmed\n")
    return folder


class Farm:
    """A cluster; `farmed` is the folder of wishes, and `environment` the nodes' own."""

    def __init__(self, folder: Path, nodes: int, environment: Mapping[str, str]) -> None:
        from ray.cluster_utils import Cluster

        self.farmed, self._environment = folder, environment
        self._cluster = Cluster()
        self.add(include_dashboard=False)
        for _ in range(nodes - 1):
            self.add()
        self.address: str = self._cluster.address

    def add(self, labels: dict[str, str] | None = None, first: Path | None = None, **options: Any) -> Any:
        """A node of one CPU; FARMED_… are its environment's, and its modules are looked up in `first` first."""
        told = {name: options.pop(name) for name in list(options) if name.startswith("FARMED")}
        path = os.pathsep.join(map(str, filter(None, [first, self.farmed, *sys.path])))
        environment = {"FARMED": str(self.farmed), "PYTHONPATH": path, **self._environment, **told}
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
    def running(cls, folder: Path, nodes: int = 2, **environment: str) -> Iterator[Farm]:
        """Nodes of one CPU, for a while; without Ray the test is skipped."""
        pytest.importorskip("ray")
        farm = cls(folder, nodes, environment)
        try:
            yield farm
        finally:
            farm.close()

    def close(self) -> None:
        self._cluster.shutdown()
