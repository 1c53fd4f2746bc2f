"""The threads of a library of llmc's kernels: a team of its own (kernels/source/team.c), in the place of ONNX Runtime's
pool, for as long as anyone in this process uses the library."""

from __future__ import annotations

import _ctypes
import ctypes
import threading
from collections import Counter

_lock = threading.Lock()
_users: Counter[int] = Counter()
"""Of each library, by its handle: files that are links to one are one library."""


class Team:
    """The share that one user has in the team of the library at `path`, which ONNX Runtime has opened.

    The team has the `threads` of whoever came last, the calling thread among them; it ends with its last user. Sessions
    that run at once take turns: a job that finds the team at work runs on ONNX Runtime's pool.
    """

    def __init__(self, path: str, threads: int) -> None:
        self._library = ctypes.CDLL(path)
        with _lock:
            _users[self._library._handle] += 1
            self._set_threads(threads)

    def close(self) -> None:
        """Give the share back, and the hold on the library."""
        handle = self._library._handle
        with _lock:
            _users[handle] -= 1
            if not _users[handle]:
                del _users[handle]
                self._set_threads(0)
            _ctypes.dlclose(handle)

    def _set_threads(self, threads: int) -> None:
        """Libraries of before there were teams have none."""
        if (set_threads := getattr(self._library, "SetThreads", None)) is not None:
            set_threads(ctypes.c_uint32(threads))
