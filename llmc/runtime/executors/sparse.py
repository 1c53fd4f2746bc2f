"""Memory that the system provides page by page, when it is written."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray


def sparse_bytes(count: int) -> NDArray[np.uint8]:
    """`count` zero bytes whose memory is taken page by page.

    numpy asks for huge pages, each of which is there, and cleared, from its first token on: twenty times the memory for
    slots of a hundred tokens in a cache for two thousand, and a first prompt that takes a second longer.
    """
    pages = mmap.mmap(-1, max(1, count), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, np.uint8)[:count]
