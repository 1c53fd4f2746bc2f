"""A prefill side in another process or on another host, with automatic reconnection.

Unanswered prompts are sent again on the next connection. After PATIENCE_S without a connection they fail, and new ones
fail at once, so that the decode side computes them.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.errors import DeviceError, LlmcError
from llmc.runtime.disaggregated.facts import require_fit
from llmc.runtime.disaggregated.wire import Frames, WireError, enter, narrower
from llmc.runtime.engine.kv_transfer import KVTransfer, Prefilled, Prefiller, PrefillFailed

if TYPE_CHECKING:
    from llmc.runtime.disaggregated.facts import SideFacts
    from llmc.runtime.disaggregated.wire import PeerAddress
    from llmc.runtime.executors.base import Executor

PATIENCE_S = 1.0
"""Seconds without a connection after which prompts fail, so that the decode side computes them."""
CONNECT_S = 5.0
TRIES = 3
"""How often a prompt is sent if connections are lost."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_log = logging.getLogger("llmc")


@dataclass(slots=True)
class _Requested:
    """A prompt without an answer yet: the time.perf_counter() of its submission, and how often it was sent."""

    prompt: array[int]
    priority: int
    requested_s: float
    sent: int = 0


class RemotePrefiller(Prefiller):
    """Sends prompts to the prefill side at `address`, whose facts must fit `facts`, those of this side.

    `key`: the shared key, see wire.py. Raises DeviceError if nothing answers at the address or the keys differ, and
    ArtifactError if the two sides do not fit.
    """

    def __init__(
        self, address: PeerAddress, facts: SideFacts, key: str | None = None, patience_s: float = PATIENCE_S
    ) -> None:
        self._lock = threading.Lock()
        super().__init__(threading.Condition(self._lock))
        self._address = address
        self._mine = facts
        self._key = key
        self._patience = patience_s
        self._requested: dict[int, _Requested] = {}
        self._lost_s: float | None = None
        """time.monotonic() of the connection loss; None while connected."""
        self.connections = 0
        """Number of connections made so far."""
        try:
            self._frames = self._connect()
        except (OSError, EOFError, WireError) as e:
            raise DeviceError(
                f"{address}: no prefill side answers there ({e or type(e).__name__}); start it: llmc prefill BUNDLE "
                f"--listen {str(address).removeprefix('tcp://')}"
            ) from e
        self._thread = threading.Thread(target=self._run, name="llmc-prefill-client", daemon=True)
        self._thread.start()

    @property
    def longest_prompt(self) -> int:
        return self._theirs.longest_prompt

    @property
    def bound(self) -> int:
        return self._bound

    def submit(self, number: int, prompt: Sequence[int], priority: int = 0) -> None:
        requested = _Requested(array("q", prompt), priority, time.perf_counter())
        with self._lock:
            self._requested[number] = requested
            if self._lost_s is None:
                self._send(number, requested)
            elif self._impatient:
                self._fail(f"{self._address}: the prefill side is gone")

    def cancel(self, number: int) -> None:
        with self._lock:
            if self._requested.pop(number, None) is None:
                self._forget(number)
            elif self._lost_s is None:
                self._try(lambda: self._frames.send({"kind": "cancel", "number": number}))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._requested.clear()
            self._came.clear()
            self._changed.notify_all()
            if self._lost_s is None:
                self._frames.close()
        self._thread.join(CONNECT_S)

    @property
    def compilations(self) -> int:
        return 0

    def prepare(self, work: Callable[[Executor], object]) -> None:
        """Do nothing: `llmc prefill` prepares its own executor."""

    @property
    def _impatient(self) -> bool:
        return self._lost_s is not None and time.monotonic() - self._lost_s >= self._patience

    def _connect(self) -> Frames:
        connection = self._address.connect(CONNECT_S)
        frames = Frames(connection)
        try:
            self._theirs, self._bound = enter(frames, self._key, str(self._address))
            differences = require_fit(self._theirs, self._mine)
        except BaseException:
            frames.close()
            frames.release()
            raise
        if not self.connections:
            for difference in differences:
                _log.warning("disaggregated prefill with %s: %s", self._address, difference)
        self._dtype = narrower(self._mine.cache_dtype, self._theirs.cache_dtype)
        self.connections += 1
        return frames

    def _run(self) -> None:
        while True:
            try:
                while not self._closed and self._receive():
                    self.notify()
                reason = "the prefill side closed the connection"
            except (WireError, OSError) as e:
                reason = str(e) or type(e).__name__
            with self._lock:
                self._lost_s = time.monotonic()
                self._frames.close()
                self._frames.release()
                waiting = len(self._requested)
            if self._closed:
                return
            _log.warning("%s: connection lost (%s); %d prompts wait for the next one", self._address, reason, waiting)
            if not self._reconnect():
                return

    def _reconnect(self) -> bool:
        """Reconnect and resend unanswered prompts; false if this is closed."""
        pause = _SHORTEST_PAUSE_S
        while True:
            with self._lock:
                if self._changed.wait_for(lambda: self._closed, pause):
                    return False
            try:
                frames = self._connect()
            except (OSError, EOFError, LlmcError) as e:
                with self._lock:
                    if self._impatient and self._requested:
                        self._fail(f"{self._address}: the prefill side is gone ({e or type(e).__name__})")
                self.notify()
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                continue
            with self._lock:
                self._frames, self._lost_s = frames, None
                self._fail(f"{self._address}: the connection was lost each time this prompt was sent", TRIES)
                for number, requested in self._requested.items():
                    self._send(number, requested)
            self.notify()
            _log.warning("%s: connected again", self._address)
            return True

    def _fail(self, reason: str, sent: int = 0) -> None:
        """Fail the prompts that were sent at least `sent` times."""
        failed = [number for number, requested in self._requested.items() if requested.sent >= sent]
        for number in failed:
            del self._requested[number]
            self._came.append(PrefillFailed(number, reason, passing=False))
        self._changed.notify_all()

    def _send(self, number: int, requested: _Requested) -> None:
        header = {
            "kind": "prompt", "number": number, "priority": requested.priority, "cache_dtype": self._mine.cache_dtype
        }  # fmt: skip
        requested.sent += 1
        payload = np.asarray(requested.prompt, "<i8").tobytes()
        self._try(lambda: self._frames.send(header, payload))

    def _try(self, send: Callable[[], None]) -> None:
        try:
            send()
        except OSError:
            self._frames.close()  # the reader then loses the connection, reconnects and resends

    def _receive(self) -> bool:
        """Receive one frame, once there is room for its result; false at the end of the stream."""
        with self._lock:
            self._changed.wait_for(lambda: self._closed or len(self._came) < self._bound)
            if self._closed:
                return False
        header = self._frames.receive()
        if header is None:
            return False
        number = header.get("number")
        with self._lock:
            requested = self._requested.get(number) if type(number) is int else None
        if requested is None or type(number) is not int:
            most = 4 * (self._mine.vocab_size + self.longest_prompt * sum(h * w for h, w in self._mine.shapes))
            self._frames.skip(most)  # it was cancelled while the frame was on its way
            return True
        if header.get("kind") == "failed" and not self._frames.payload:
            came: Prefilled | PrefillFailed = PrefillFailed(
                number, f"{self._address}: {header.get('reason')!s:.1000}", header.get("passing") is True
            )
        else:
            came = self._prefilled(number, requested, header)
        with self._lock:
            if self._requested.pop(number, None) is not None:
                self._came.append(came)
                self._changed.notify_all()
        return True

    def _prefilled(self, number: int, requested: _Requested, header: dict[str, Any]) -> Prefilled:
        length = len(requested.prompt)
        if header.get("kind") != "prefix" or (header.get("dtype"), header.get("length")) != (self._dtype, length):
            raise WireError(f"a frame that is no answer to prompt {number}")
        cached = header.get("cached")
        if type(cached) is not int or not 0 <= cached < length:
            raise WireError(f"{cached!r:.20} tokens of a prefix of {length}")
        queue, prefill, export = (_seconds(header.get(name)) for name in ("queue_s", "prefill_s", "export_s"))
        began, size = time.perf_counter(), self._frames.payload
        shapes = [(heads, length, width) for heads, width in self._mine.shapes]
        logits, prefix = self._frames.take_prefix(self._mine.vocab_size, shapes, self._dtype)
        now = time.perf_counter()
        waited = max(0.0, began - requested.requested_s - queue - prefill - export)
        cost = KVTransfer(length, cached, size, queue, prefill, export, now - began, waited)
        return Prefilled(number, prefix, logits, cost, now)


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e9:
        raise WireError(f"{value!r:.20} seconds")
    return float(value)
