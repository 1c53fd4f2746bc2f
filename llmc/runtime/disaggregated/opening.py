"""Open the prefill side of an engine: a bundle in this process or in a child process, or an address."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from llmc.artifacts.log import logger
from llmc.artifacts.temporaries import temporary_folder
from llmc.errors import DeviceError
from llmc.runtime.bundle import Bundle
from llmc.runtime.disaggregated.facts import SideFacts, require_fit
from llmc.runtime.disaggregated.remote import RemotePrefiller
from llmc.runtime.disaggregated.wire import PeerAddress
from llmc.runtime.disaggregated.worker import PrefillWorker

if TYPE_CHECKING:
    from pathlib import Path

    from llmc.runtime.disaggregated.facts import SideFacts
    from llmc.runtime.engine.kv_transfer import Prefiller
    from llmc.runtime.executors.base import Executor

GRACE_S = 10.0
"""Seconds that the process gets to exit by itself."""
_PAUSE_S = 1.0
_log = logging.getLogger("llmc")


class ChildPrefiller(RemotePrefiller):
    """Runs `llmc prefill BUNDLE` in a child process, over a Unix socket that only this user can reach.

    The child watches its standard input, so it exits whenever this process does. Raises DeviceError if the child does
    not start, and ArtifactError if the two sides do not fit; errors of the bundle appear on standard error.
    """

    def __init__(self, bundle: str, facts: SideFacts, key: str | None = None) -> None:
        self._opened = ExitStack()
        path = str(self._opened.enter_context(temporary_folder("prefill")) / "socket")
        self._command = [sys.executable, "-m", "llmc.cli.main", "prefill", bundle, "--listen", f"unix:{path}"]
        self._command += ["--json", "--end-with-input"]
        self._ending = threading.Event()
        try:
            self._process = self._start(bundle)
        except BaseException:
            self._opened.close()
            raise
        try:
            super().__init__(PeerAddress(path=path), facts, key)
        except BaseException:
            self._end()
            raise
        self._watcher = threading.Thread(target=self._watch, args=(bundle,), name="llmc-prefill-watch", daemon=True)
        self._watcher.start()

    @property
    def process(self) -> int:
        """PID of the current child process."""
        return self._process.pid

    def close(self) -> None:
        self._ending.set()
        super().close()
        self._process.terminate()
        self._watcher.join()
        self._end()

    def _start(self, bundle: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        line = process.stdout.readline()
        with suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["event"] == "listening":
                return process
        process.kill()
        _release(process)
        raise DeviceError(f"{bundle}: the prefill process did not start and ended with code {process.returncode}")

    def _watch(self, bundle: str) -> None:
        while not self._ending.is_set():
            self._process.wait()
            if self._ending.wait(_PAUSE_S):
                return
            _log.warning("%s: the prefill process ended with code %s; starting it again", bundle,
                         self._process.returncode)  # fmt: skip
            _release(self._process)
            try:
                self._process = self._start(bundle)
            except (DeviceError, OSError) as e:
                _log.warning("%s", e)
                time.sleep(_PAUSE_S)

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        _release(self._process)
        self._opened.close()


def _release(process: subprocess.Popen[str]) -> None:
    """Close the pipes of an ending process, and wait for its exit."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()


PROCESS = "process:"
"""Prefix of a bundle path: open the bundle in a separate process."""


def open_prefiller(
    prefill: str | Path, bundle: Bundle, executor: Executor, open_executor: Callable[[Bundle], Executor],
    min_prefix: int | None = None,
) -> Prefiller:  # fmt: skip
    """Open the side that computes the prompts of `bundle`, which is open on `executor`.

    `prefill` is a bundle to open in this process, a bundle with "process:" before it to open in a child process, or an
    address. `open_executor` opens the prefill bundle's executor, in the thread that will run it; `min_prefix` is that
    of SchedulerConfig. Raises ArtifactError or DeviceError if the prefill side cannot be opened or does not fit
    `bundle`.
    """
    if str(prefill).startswith(PROCESS):
        other = str(prefill).removeprefix(PROCESS)
        return ChildPrefiller(other, SideFacts.of(bundle, executor), bundle.settings.prefill_key)
    address = PeerAddress.parse(str(prefill))
    if address is not None:
        return RemotePrefiller(address, SideFacts.of(bundle, executor), bundle.settings.prefill_key)
    opened = Bundle.open(prefill, bundle.settings)
    worker = PrefillWorker(opened, lambda: open_executor(opened), min_prefix)
    try:
        differences = require_fit(worker.facts, SideFacts.of(bundle, executor))
    except BaseException:
        worker.close()
        raise
    for difference in differences:
        logger().warning("disaggregated pair of %s and %s: %s", opened.path, bundle.path, difference)
    return worker.client(owned=True)
