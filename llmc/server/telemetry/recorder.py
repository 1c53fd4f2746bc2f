"""Traffic as it comes, for the next plan: one line a sequence, lengths and times only, never text or names."""

from __future__ import annotations

import os
from pathlib import Path

from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.reader import record_line
from llmc.errors import InputError
from llmc.runtime.engine.observer import Observer, RequestSummary
from llmc.server.telemetry.background_file import BackgroundFile

_START = b'{"time": '
_LONGEST_LINE = 256


class TrafficRecorder(Observer):
    """Appends every request that ends to `path`, in the format that `llmc plan --traffic` reads.

    A request that was cut (client gone, error, shutdown) is recorded with what it got; one that got no token has 0
    output tokens, which a reader counts and leaves out. A request of several choices is one line a choice, which share
    its output tokens evenly, the prompt cached for all but the first. Lines come as requests end, at most a quarter of
    a second later, each whole: several servers may append to one file. Times are those of arrival, in seconds since
    the epoch. A file that ends in half a line, where a machine stopped, loses that half.

    A failing disk is logged once, and tried again. Raises InputError when `path` cannot be written or holds something
    else than a recording.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = Path(path)
        try:
            _mend(path)
            self._file = BackgroundFile[RequestSummary](path, lines_of)
        except OSError as error:
            raise InputError(
                f"cannot write the traffic recording {path}: {error.strerror}; give another file with --record-traffic"
            ) from None

    def finished(self, summary: RequestSummary) -> None:
        """Record the request."""
        self._file.put(summary)

    @property
    def lost(self) -> int:
        """Requests that could not be written."""
        return self._file.lost

    def flush(self) -> bool:
        """Wait until what ended before is in the file (or lost)."""
        return self._file.flush()

    def close(self) -> None:
        """Write the rest and close."""
        self._file.close()


def lines_of(summary: RequestSummary) -> str:
    """The lines of one request, a choice each."""
    choices = max(1, len(summary.finish_reasons))
    each, more = divmod(summary.output_tokens, choices)
    time = round(summary.arrived_at, 3)
    return "".join(
        record_line(
            TrafficRequest(
                time, summary.prompt_tokens, each + (i < more), summary.prompt_tokens if i else summary.cached_tokens
            )
        )
        for i in range(choices)
    )


def _mend(path: Path) -> None:
    """Cut half a line off the end. Raises InputError for a file that is no recording."""
    if not path.is_file() or not (size := path.stat().st_size):
        return
    with path.open("r+b") as file:
        first = file.read(len(_START))
        if not first or not _START.startswith(first):
            raise InputError(
                f"{path} is not a recording: it does not start as its lines do; give another file with --record-traffic"
            )
        file.seek(max(0, size - _LONGEST_LINE))
        tail = file.read()
        if tail.endswith(b"\n"):
            return
        half = tail[tail.rfind(b"\n") + 1 :]
        if not (half.startswith(_START) or _START.startswith(half)):
            raise InputError(
                f"{path} is not a recording: its last line is none of its own; give another file with --record-traffic"
            )
        if half.endswith(b"}"):
            file.write(b"\n")
        else:
            file.truncate(size - len(half))
