"""`llmc serve --executor ray` as a process of its own."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from tests.server.process import Process


def free_port() -> int:
    """One that nobody has now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class OverRay(Process):
    """Serves `bundle` over the cluster at `address`, one CPU a replica."""

    starts_s = 240.0  # Ray's own processes start one after the other

    def __init__(self, address: str, cache: Path, bundle: Path, *arguments: Any, before: str = "") -> None:
        cluster = ("--executor", "ray", "--address", address, "--threads", "1")
        super().__init__(cache, bundle, *cluster, "--port", free_port(), *arguments, before=before)
