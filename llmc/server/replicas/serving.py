"""`serve` with several processes on one host: one port, shared CPUs, weights mapped once."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.artifacts.temporaries import temporary_folder
from llmc.cpus import allowed_cpus, shares, usable_cpus
from llmc.errors import InputError
from llmc.runtime.startup.opening import EngineOptions
from llmc.server.events import Listening
from llmc.server.replicas.handed import Handed
from llmc.server.replicas.process import failure_of
from llmc.server.replicas.supervisor import Supervisor
from llmc.server.serve import listen_at, serve
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.server.events import OnEvent
    from llmc.server.loading import OpenBundle
    from llmc.server.state import ServerConfig


def serve_replicas(
    count: int, config: ServerConfig, open_bundle: OpenBundle, *, options: EngineOptions | None = None,
    report: OnEvent = lambda _: None, uds: Path | None = None, **how: Any,
) -> int:  # fmt: skip
    """Run `serve` in `count` processes; `how` is passed to it. Connection and request bounds apply to each process.

    A replica gets its share of the CPUs, and a thread for each unless `options` say otherwise. The bundle's weights are
    pages of one file, which all processes share. `/metrics` covers all replicas, and SIGHUP swaps the bundle in each.

    Raises InputError for more replicas than CPUs and for options that several processes cannot share, and the error of
    a replica that ended before all were ready once.
    """
    options = options or EngineOptions()
    threads = _check(count, config, options)
    listener = listen_at(config, uds)
    started = mmap(-1, count)
    with temporary_folder("replicas") as folder:

        def run(number: int, theirs: socket.socket) -> int:
            handed = Handed(theirs, listener.url, number=number, folder=folder, started=started)
            cpus = shares(count)[number]
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, cpus)
            each = replace(options, threads=threads or len(cpus))
            try:
                return serve(config, open_bundle, options=each, report=handed.on_progress, listener=handed, **how)
            except Exception as error:  # noqa: BLE001 - the supervisor reports it
                failure = failure_of(error)
                handed.on_progress(failure)
                return failure.code

        report(Listening(listener.url, not (listener.local or config.api_keys)))
        try:
            return Supervisor(listener, count, run, started, report, config.shutdown_timeout_s).run()
        finally:
            listener.close()


def _check(count: int, config: ServerConfig, options: EngineOptions) -> int | None:
    """Return the threads of each replica; None: one per CPU. Raises InputError."""
    if not hasattr(os, "fork"):
        raise InputError("--replicas: this system has no fork; start one server for each port, behind a load balancer")
    usable = usable_cpus()
    if count > usable:
        raise InputError(
            f"--replicas {count}: this process may use {usable} CPUs, and a replica takes one at least; ask for at "
            f"most {usable}"
        )
    if config.admin_tokens:
        raise InputError("--admin-token: a request would reach one replica of several; with --replicas send SIGHUP")
    if config.record_traffic is not None:
        raise InputError("--record-traffic: one server's file, not for --replicas; leave it out")
    of_quota = max(1, usable // count) if usable < len(allowed_cpus()) else None
    return options.threads or Settings.from_environment().threads_override or of_quota
