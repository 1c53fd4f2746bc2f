"""Connections to a Ray cluster, for compiling and serving on it."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from llmc.errors import DeviceError, InputError
from llmc.platforms import missing

AUTO = "auto"
"""Address of the cluster that runs on this host."""
CONNECT_S = 5.0


@contextmanager
def connected(address: str, environment: Mapping[str, Any] | None = None) -> Iterator[Any]:
    """Connect to the Ray cluster at HOST:PORT or AUTO, and yield the `ray` module. An existing connection is reused.

    `environment` is the Ray runtime environment of the workers that this process starts. Raises DeviceError if the
    cluster cannot be reached, runs another Ray or Python version, or Ray is not installed; InputError if `address` is
    malformed.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise missing("ray") from None
    if ray.is_initialized():
        yield ray
        return
    _reach(address)
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address, log_to_driver=False, logging_level="ERROR",
            runtime_env=dict(environment) if environment else None,
        )  # fmt: skip
    except (ConnectionError, RuntimeError, ValueError) as e:
        if str(e).startswith("Version mismatch"):
            said = " ".join(str(e).split())
            raise DeviceError(f"{said} Install the same Ray and Python versions on all nodes and on this host") from e
        raise _away(address, str(e).partition("\n")[0]) from e
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)
    try:
        yield ray
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Raise DeviceError if nothing listens. Ray itself would wait for minutes and then end the process."""
    if address == AUTO:
        return
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"--address {address}: write it as HOST:PORT, as `ray start --head` prints it")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as e:
        raise _away(address, str(e)) from e


def _away(address: str, why: str) -> DeviceError:
    where = "on this host" if address == AUTO else f"at {address}"
    return DeviceError(
        f"no Ray cluster {where}: {why}; start one with `ray start --head`, and name it with --address HOST:PORT or "
        "RAY_ADDRESS"
    )
