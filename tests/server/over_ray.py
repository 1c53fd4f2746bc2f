"""`llmc serve --executor ray` as a process of its own."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from tests.server.process import Process


def free_port() -> int:
    """One that nobody has now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def own_ports(which: int) -> dict[str, str]:
    """Variables for the ports of HAProxy and of replicas of the cluster numbered `which`, 0 or 1, of this worker.

    Two clusters on a host want the same, and Ray leaves a cluster's variables to those that the same process starts
    later. None is one that a system gives out by itself.
    """
    first = 27000 + 600 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) + 300 * which
    names = ("HAPROXY_METRICS", "HAPROXY_STATS", "FALLBACK_PROXY_HTTP", "FALLBACK_PROXY_GRPC")
    single = {f"{name}_PORT": first + place for place, name in enumerate(names)}
    replica = {
        f"DIRECT_INGRESS_{end}_{what}_PORT": first + after + (end == "MAX") * 99
        for after, what in ((100, "HTTP"), (200, "GRPC"))
        for end in ("MIN", "MAX")
    }
    return {f"RAY_SERVE_{name}": str(port) for name, port in {**single, **replica}.items()}


class OverRay(Process):
    """Serves `bundle` over the cluster at `address`, one CPU a replica."""

    starts_s = 240.0  # Ray's own processes start one after the other

    def __init__(self, address: str, cache: Path, bundle: Path, *arguments: Any, before: str = "") -> None:
        cluster = ("--executor", "ray", "--address", address, "--threads", "1")
        super().__init__(cache, bundle, *cluster, "--port", free_port(), *arguments, before=before)
