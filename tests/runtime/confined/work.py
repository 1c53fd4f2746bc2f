"""Jobs that do harm, for children of a pool."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmc.errors import InputError

_kept: list[bytes] = []


def open_work(greeting: str) -> Callable[[Any], Any]:
    """What a nursery is told to do."""

    def work(job: Any) -> Any:
        match job:
            case ["echo", value]:
                return [greeting, value, os.getpid()]
            case ["spin"]:
                while True:
                    pass
            case ["sleep", seconds]:
                return time.sleep(seconds)
            case ["wait for", file]:
                while not Path(file).exists():
                    time.sleep(0.005)
            case ["memory", size]:
                return len(bytearray(size))
            case ["keep", size]:
                _kept.append(b"x" * size)
            case ["used", size]:  # and freed, but for what lies at the end
                library = ctypes.CDLL(None)
                library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
                blocks = [library.malloc(100_000) for _ in range(size // 100_000)]
                for block in blocks:
                    ctypes.memset(block, 1, 100_000)
                library.malloc(100_000)
                for block in blocks:
                    library.free(block)
            case ["native memory", size]:  # as native code does without memory
                if not ctypes.CDLL(None).calloc(1, size):
                    os.abort()
            case ["recursion", depth]:
                return _deep(depth)
            case ["signal", number]:
                signal.raise_signal(number)  # to this thread, at once
            case ["refuse", why]:
                raise InputError(why)
            case ["fault"]:
                raise KeyError("missing")
        return None

    return work


def _deep(depth: int) -> int:
    return 0 if not depth else 1 + _deep(depth - 1)
