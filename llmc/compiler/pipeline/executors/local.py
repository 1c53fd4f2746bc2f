"""Compile executables on this host: `--jobs` at once, in threads, or in processes where the target needs them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from llmc.compiler.options import LOCAL, CompileOptions
from llmc.compiler.pipeline.executors.base import (
    BuiltExecutable,
    CompileExecutor,
    CompileWork,
    Done,
    compile_in_worker,
    linked,
    stored,
)
from llmc.compiler.targets.workers import Jobs, Workers
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.workspace import Workspace
    from llmc.compiler.targets.base import Lowered, Shape


def open_executor(options: CompileOptions) -> LocalExecutor:
    """Open the executor. Raises InputError for an address or a memory bound, which it does not take."""
    if options.address is not None or options.worker_memory is not None:
        raise InputError(f"--address and --worker-memory are for a cluster; leave them out for --executor {LOCAL}")
    return LocalExecutor()


class LocalExecutor(CompileExecutor):
    """Compiles in threads or processes of this host."""

    def compile(self, work: CompileWork, shapes: Sequence[Shape], done: Done) -> list[BuiltExecutable]:
        """Compile the shapes."""
        target, options, lowered = work.target, work.options, work.lowered
        with ExitStack() as stack:
            linking = threading.Lock()
            device = target.description
            apart = device.fresh_process or (device.needs_processes and options.jobs > 1)
            workers = partial(Workers, preload=device.fresh_process) if apart else None
            jobs = stack.enter_context(Jobs(options.jobs, workers))
            there: list[Lowered] = []

            def ready() -> Lowered:
                with linking:
                    if not there:
                        there.append(replace(lowered, folder=stack.enter_context(linked(work.store, lowered))))
                return there[0]

            def build(shape: Shape) -> BuiltExecutable:
                began = time.perf_counter()

                def make(workspace: Workspace) -> Mapping[str, Blob]:
                    at = time.perf_counter()
                    inputs = ready()
                    if apart:
                        built = jobs.apart(str(shape), compile_in_worker, options.device, inputs, shape, options)
                    else:
                        built = target.compile(inputs, shape, options)
                    return stored(workspace, built, time.perf_counter() - at)

                entry, hit = work.store.get_or_build(work.key(shape), make)
                return BuiltExecutable(entry, hit, time.perf_counter() - began)

            return jobs.each(build, shapes, done)
