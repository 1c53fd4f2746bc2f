"""A prefill server for other processes: a listener, and two threads for each connection.

One thread reads prompts and submits them to the worker, the other sends the results. If a client does not read, its
socket fills, then its bound at the worker; the worker then computes nothing for it and serves the others. Closing a
connection cancels its prompts.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.runtime.disaggregated.wire import Dtype, Frames, WireError, narrower, welcome
from llmc.runtime.engine.kv_transfer import Prefilled

if TYPE_CHECKING:
    from llmc.runtime.disaggregated.worker import PrefillWorker, WorkerClient

MAX_CONNECTIONS = 64
MAX_WAITING = 4096
"""Prompts of one client that may wait; a client that sends more is disconnected."""
_MAX_NUMBER = 1 << 62
_log = logging.getLogger("llmc")


class PrefillServer:
    """Serves `worker` on the listening socket `listener` until `close`, which also closes both.

    `key`: clients must prove that they know it; None: no key. `bound`: see PrefillWorker.client.
    """

    def __init__(
        self, worker: PrefillWorker, listener: socket.socket, key: str | None = None, bound: int | None = None
    ) -> None:
        self.worker = worker
        self.served = 0
        """Prompts computed and sent."""
        self._listener = listener
        self._key = key
        self._bound = bound
        self._lock = threading.Lock()
        self._connections: dict[Frames, threading.Thread] = {}
        """Open connections, each with its reader thread."""
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name="llmc-prefill-accept", daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        """Number of connected clients."""
        return len(self._connections)

    def close(self) -> None:
        """Close all connections and the worker, and wait for the threads."""
        self._closing = True
        with suppress(OSError):  # some systems allow this for connections only
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        with self._lock:
            open_now = dict(self._connections)
        for frames in open_now:
            frames.close()
        for thread in open_now.values():
            thread.join()
        self.worker.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError as e:
                if self._closing:
                    return
                _log.warning("a connection was not accepted: %s", e)
                time.sleep(0.1)
                continue
            try:
                frames = Frames(connection)
            except OSError:
                connection.close()
                continue
            if self._closing or len(self._connections) >= MAX_CONNECTIONS:
                frames.close()
                frames.release()
                continue
            name = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "unix socket"
            thread = threading.Thread(target=self._serve, args=(frames, name), name="llmc-prefill-peer", daemon=True)
            with self._lock:
                self._connections[frames] = thread
            thread.start()

    def _serve(self, frames: Frames, name: str) -> None:
        try:
            self._talk(frames, name, self.worker.client(self._bound))
        finally:
            frames.release()
            with self._lock:
                del self._connections[frames]

    def _talk(self, frames: Frames, name: str, client: WorkerClient) -> None:
        sender: threading.Thread | None = None
        try:
            welcome(frames, self._key, self.worker.facts, client.bound)
            connection = _Connection(self, frames, client)
            sender = threading.Thread(target=connection.send_all, name="llmc-prefill-sender", daemon=True)
            sender.start()
            connection.receive_all()
        except (WireError, EOFError, OSError) as e:
            if not self._closing:
                _log.warning("the connection of %s ended: %s", name, e or type(e).__name__)
        finally:
            frames.close()
            client.close()
            if sender is not None:
                sender.join()


class _Connection:
    def __init__(self, server: PrefillServer, frames: Frames, client: WorkerClient) -> None:
        self._server = server
        self._frames = frames
        self._client = client
        self._limits = server.worker.plan.limits
        self._vocab_size = server.worker.facts.vocab_size
        self._lock = threading.Lock()
        self._dtypes: dict[int, Dtype] = {}
        """The dtype of each unanswered prompt."""

    def receive_all(self) -> None:
        """Read prompts until the stream ends. Raises WireError for anything else."""
        while (header := self._frames.receive()) is not None:
            number = header.get("number")
            if type(number) is not int or not -_MAX_NUMBER < number < _MAX_NUMBER:
                raise WireError(f"a prompt number {number!r:.30}")
            kind = header.get("kind")
            if kind == "prompt":
                self._take(number, header)
            elif kind == "cancel" and not self._frames.payload:
                self._client.cancel(number)
                with self._lock:
                    self._dtypes.pop(number, None)
            else:
                raise WireError(f"a frame of kind {kind!r:.30}")

    def _take(self, number: int, header: dict[str, Any]) -> None:
        priority = header.get("priority")
        if type(priority) is not int or not -_MAX_NUMBER < priority < _MAX_NUMBER:
            raise WireError(f"a priority {priority!r:.30}")
        data = self._frames.take(8 * self._limits.longest_prompt)
        if not data or len(data) % 8:
            raise WireError(f"a prompt of {len(data)} bytes")
        prompt = np.frombuffer(data, "<i8")
        if int(prompt.min()) < 0 or int(prompt.max()) >= self._vocab_size:
            raise WireError(f"a prompt with token ids outside 0 … {self._vocab_size - 1}")
        dtype = narrower(str(header.get("cache_dtype")), self._server.worker.facts.cache_dtype)
        with self._lock:
            if number in self._dtypes or len(self._dtypes) >= MAX_WAITING:
                raise WireError(f"prompt {number} is refused: its number waits already, or {MAX_WAITING} others do")
            self._dtypes[number] = dtype
        self._client.submit(number, prompt.tolist(), priority)

    def send_all(self) -> None:
        """Send results until the connection or the client ends."""
        try:
            while self._client.wait():
                for result in self._client.take(1):
                    with self._lock:
                        dtype = self._dtypes.pop(result.number, None)
                    if dtype is None:
                        continue
                    if isinstance(result, Prefilled):
                        self._send(result, dtype)
                    else:
                        self._frames.send(
                            {"kind": "failed", "number": result.number, "reason": result.reason[:1000],
                             "passing": result.passing}
                        )  # fmt: skip
        except OSError:
            self._frames.close()  # this also ends the reader

    def _send(self, result: Prefilled, dtype: Dtype) -> None:
        cost = result.cost
        header = {
            "number": result.number, "length": cost.tokens, "cached": cost.cached_tokens, "queue_s": cost.queue_s,
            "prefill_s": cost.prefill_s, "export_s": cost.export_s,
        }  # fmt: skip
        self._frames.send_prefix(header, result.logits, result.prefix, dtype)
        self._server.served += 1
