"""The source of a replica's connections: its supervisor accepts them and passes each file descriptor on.

Each replica also has a Unix socket, in a folder that only this user can enter, to serve its metrics to the others.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from llmc.server.listening import Listener
from llmc.server.replicas.process import ENDED, ReplicaFailure, line_of
from llmc.server.state import Progress
from llmc.server.telemetry.metrics import SCRAPE_S, text_of, together

if TYPE_CHECKING:
    from collections.abc import Sequence
    from mmap import mmap
    from pathlib import Path

    from prometheus_client import Metric

    from llmc.server.events import Event
    from llmc.server.listening import Sockets, Take
    from llmc.server.state import ServerState

_AT_ONCE = 16


@dataclass(frozen=True)
class Handed(Listener):
    """Replica `number`'s end of its supervisor's `socket`.

    `folder` holds the replicas' own sockets. `started` is shared memory, one byte per replica: 1 once it has been
    ready.
    """

    number: int = 0
    folder: Path = field(kw_only=True)
    started: mmap = field(kw_only=True)
    _sending: threading.Lock = field(default_factory=threading.Lock, compare=False)
    _kept: set[object] = field(default_factory=set, compare=False)
    """Running tasks that nothing else refers to."""

    @property
    def sockets(self) -> Sockets:
        """None: connections arrive already accepted."""
        return ()

    @property
    def local(self) -> bool:
        """True: only the supervisor reports who can connect."""
        return True

    def close(self) -> None:
        """Do nothing: the supervisor sees how the process ends."""

    def on_progress(self, reported: Event | ReplicaFailure) -> None:
        """Report to the supervisor; thread-safe."""
        self._send(line_of(reported))

    def _send(self, line: bytes) -> None:
        with self._sending, suppress(OSError):  # it has ended; `_receive` ends this process
            self.socket.sendall(line)

    async def begin(self, take: Take, state: ServerState) -> None:
        """Pass connections to `take` until the supervisor ends, which stops the server."""
        state.awaits, state.all_metrics = self._awaits, self._all_metrics

        async def report_metrics(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            del reader
            text, _ = await asyncio.to_thread(lambda: text_of(state.metrics_as(str(self.number))))
            with suppress(OSError):
                writer.write(text)
                await writer.drain()
            writer.close()

        path = self.folder / str(self.number)
        path.unlink(missing_ok=True)  # left by a replica that was killed
        self._kept.add(await asyncio.start_unix_server(report_metrics, path))
        asyncio.get_running_loop().add_reader(self.socket, self._receive, take)

    def _receive(self, take: Take) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self.socket, _AT_ONCE, _AT_ONCE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        loop = asyncio.get_running_loop()
        if not data:
            loop.remove_reader(self.socket)
            os.kill(os.getpid(), signal.SIGTERM)
        for fd in fds:
            os.set_inheritable(fd, False)
            task = loop.create_task(take(socket.socket(fileno=fd), lambda: self._send(ENDED)))
            self._kept.add(task)
            task.add_done_callback(self._kept.discard)

    def _awaits(self) -> Progress | None:
        """Return the progress of replicas that have never been ready yet."""
        done, total = sum(self.started[:]), len(self.started)
        return Progress("replicas", done, total) if done < total else None

    async def _all_metrics(self) -> Sequence[Metric]:
        """Return the metrics of all replicas that respond within SCRAPE_S."""
        requested = (self._metrics_of(number) for number in range(len(self.started)))
        answers = await asyncio.gather(*requested, return_exceptions=True)
        return together(answer for answer in answers if not isinstance(answer, BaseException))

    async def _metrics_of(self, number: int) -> Sequence[Metric]:
        async with asyncio.timeout(SCRAPE_S):
            reader, writer = await asyncio.open_unix_connection(self.folder / str(number))
            text = (await reader.read()).decode()
            writer.close()
        return list(text_string_to_metric_families(text))
