"""The C library's heap: memory that was freed goes back to the system. Elsewhere than with glibc nothing happens."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

LARGE_BYTES = 8 << 20
"""Allocations from this size on, in bytes, come straight from the system and return to it when they are freed."""
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8


def share_heap() -> None:
    """Make all threads that start from now on share one heap. A server calls this before it starts threads.

    glibc gives each thread its own heap, and `trim` cannot give back the free end of such a heap. Besides, each time a
    large piece is freed, glibc raises the size from which a piece counts as large.
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
    """Exclude all present objects from later garbage collections, which would block the interpreter in proportion to
    their number, and give memory that loading freed back to the system."""
    gc.unfreeze()  # what was served before another bundle took its place may be garbage by now
    gc.collect()
    gc.freeze()
    trim()
