"""What something took of the card's and of the host's memory, in the guide's words."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from llmc.buckets.capture.log import took_line
from llmc.buckets.render.text import size_text
from llmc.runtime.host import available_memory, host_memory

if TYPE_CHECKING:
    from llmc.runtime.executors.whole_step.card import Card

_log = logging.getLogger("llmc")


@contextmanager
def took(card: Card, what: str) -> Iterator[None]:
    """Log what the block took, at INFO; negative values are memory that was released.

    "Model profiling run took 504 MiB of device memory (15.46 GiB/94.62 GiB used) and 180.9 MiB of host memory
    (475.4 GiB/1007 GiB used)"

    Garbage is collected first, which takes a second where there are millions of objects; nothing is done where nobody
    reads the line.
    """
    if not _log.isEnabledFor(logging.INFO):
        yield
        return
    gc.collect()
    (before, _), host_before = card.memory(), available_memory()
    yield
    gc.collect()
    (after, total), host_after, host = card.memory(), available_memory(), host_memory()
    line = took_line(what, before - after, total - after, total)
    if host is not None and host_before is not None and host_after is not None:
        line += f" and {size_text(host_before - host_after)} of host memory "
        line += f"({size_text(host - host_after)}/{size_text(host)} used)"
    _log.info("%s", line)
