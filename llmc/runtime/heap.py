"""The C library's heap: memory that was freed goes back to the system. Elsewhere than with glibc nothing happens."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

LARGE_BYTES = 8 << 20
"""A piece of this size is of no heap: it is taken from the system, and given back when it is freed."""
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8


def share_heap() -> None:
    """Let the threads that begin from now on have one heap together. For who serves, before any begins.

    glibc gives each thread a heap of its own, and `trim` cannot give back the free end of one; besides, every large
    piece that is freed makes it count as large only what is larger still.
    """
    with suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_ARENA_MAX, 1)
        library.mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def trim() -> None:
    """Give freed memory back to the system."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def settle() -> None:
    """What lives now is here to stay: no later search for garbage goes through it, which would hold the interpreter for
    as long as there are objects, and memory that loading freed is given back."""
    gc.collect()
    gc.freeze()
    trim()
