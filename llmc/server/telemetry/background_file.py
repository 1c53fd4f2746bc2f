"""A file that lines are written to by a thread of its own, so that a slow or full disk never holds up the engine."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from llmc.errors import InputError

Item = TypeVar("Item")

PERIOD_S = 0.25
"""How long an item waits at most before it is written, in seconds, while the disk keeps up."""

MAX_PENDING = 1 << 16
"""Items that wait at most; while the disk is slower than that, further ones are lost, and counted."""

BATCH = 256
"""Items that one write takes at most."""

_log = logging.getLogger("llmc")


class BackgroundFile(Generic[Item]):
    """Writes what `render` makes of each item, in order; items are whole lines, and a write is never half of one.

    `what` names the file in messages ("the step trace"), `flag` is the flag that gave it. A write that fails (disk
    full) is logged once and what it held is lost: with `retry` later items are tried again, and success is logged,
    without it nothing more is written. Past `max_bytes` nothing more is written either. `closing` makes the last text,
    given why it is the last: None when closed, else the reason in words. Never raises after the constructor, which
    raises InputError when the file cannot be opened; `open_flags` says how.
    """

    def __init__(
        self, path: Path, render: Callable[[Item], str], *, what: str, flag: str, open_flags: int, retry: bool = False,
        max_bytes: int | None = None, closing: Callable[[str | None], str] | None = None,
    ) -> None:  # fmt: skip
        self.path = path
        self.lost = 0
        self._render, self._closing = render, closing or (lambda reason: "")
        self._what, self._retry, self._max_bytes = what, retry, max_bytes
        self._pending: deque[Item] = deque()
        self._wake = threading.Condition()
        self._flushes = self._flushed = 0
        self._end = False
        self._stopped = False
        self._failing = False
        self._written = 0
        try:
            self._file = os.open(path, open_flags | os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise InputError(f"cannot write {what} {path}: {error.strerror}; give another file with {flag}") from None
        self._thread = threading.Thread(target=self._run, name=f"llmc {what}", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Have `item` written soon; from one thread only. Takes a tenth of a microsecond."""
        if self._stopped or len(self._pending) >= MAX_PENDING:
            self.lost += 1
        else:
            self._pending.append(item)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until what was put before is written or lost; whether it was in time."""
        with self._wake:
            self._flushes += 1
            mine = self._flushes
            self._wake.notify_all()
            return self._wake.wait_for(lambda: self._flushed >= mine or not self._thread.is_alive(), timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Write the rest and close; waits at most `timeout_s`. Idempotent."""
        with self._wake:
            self._end = True
            self._wake.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        end = False
        while not end:
            with self._wake:
                self._wake.wait_for(lambda: self._end or self._flushes > self._flushed, PERIOD_S)
                end, flushes = self._end, self._flushes
            while self._pending:
                self._write_batch()
            with self._wake:
                self._flushed = flushes
                self._wake.notify_all()
        if not self._stopped:
            self._write(self._closing(None))
        self._stopped = True
        os.close(self._file)

    def _write_batch(self) -> None:
        count = min(BATCH, len(self._pending))
        items = [self._pending.popleft() for _ in range(count)]
        if self._stopped:
            self.lost += count
            return
        text = "".join(map(self._render, items))
        if self._max_bytes is not None and self._written + len(text) > self._max_bytes:
            self.lost += count
            reason = f"it reached {self._max_bytes >> 20} MiB"
            self._stop(reason)
            self._write(self._closing(reason))
        elif not self._write(text):
            self.lost += count

    def _write(self, text: str) -> bool:
        """All of `text` or nothing of it."""
        if not text:
            return True
        data = memoryview(text.encode())
        done = 0
        try:
            while done < len(data):
                done += os.write(self._file, data[done:])
        except OSError as error:
            self._take_back(done)
            self._failed(error)
            return False
        self._written += done
        if self._failing:
            self._failing = False
            _log.warning("%s %s is written again; %d entries were lost", self._what, self.path, self.lost)
        return True

    def _take_back(self, count: int) -> None:
        if count:
            try:
                os.ftruncate(self._file, os.fstat(self._file).st_size - count)
            except OSError as error:
                _log.warning("%s %s ends in half a line: %s", self._what, self.path, error.strerror)

    def _failed(self, error: OSError) -> None:
        if self._retry:
            if not self._failing:
                self._failing = True
                _log.warning(
                    "cannot write %s %s: %s; entries are lost until there is room", self._what, self.path,
                    error.strerror,
                )  # fmt: skip
        elif not self._stopped:
            self._stop(error.strerror or str(error))

    def _stop(self, reason: str) -> None:
        self._stopped = True
        _log.warning("%s %s ends here: %s; serving goes on", self._what, self.path, reason)
