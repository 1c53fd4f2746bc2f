"""Return freed memory of the C library's heap to the system. Only glibc is supported; elsewhere these are no-ops."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

LARGE_BYTES = 8 << 20
"""Allocations of at least this size, in bytes, come from the system directly and return to it when freed."""
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8


def share_heap() -> None:
    """Make all threads started from now on share one heap. A server calls this before it starts threads.

    glibc gives each thread its own heap, and `trim` cannot return the free end of such a heap. glibc also raises its
    threshold for large allocations whenever a large allocation is freed.
    """
    with suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_ARENA_MAX, 1)
        library.mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def trim() -> None:
    """Return freed memory to the system."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def settle() -> None:
    """Exclude all present objects from later garbage collections and return memory that loading freed to the system.

    Collections would otherwise block the interpreter in proportion to the number of objects.
    """
    gc.unfreeze()  # what was served before another bundle took its place may be garbage by now
    gc.collect()
    gc.freeze()
    trim()
