"""Who compiled what: torch.compile's counter of graphs around each step.

torch 2.11 to 2.13, torch/_dynamo/utils.py, `counters["stats"]["unique_graphs"]`: graphs that were handed to a compiler
in this process. A package that is loaded compiles nothing (package.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.runtime.executors.compilations import CompilationCounter


@contextmanager
def watched(counter: CompilationCounter, what: str) -> Iterator[None]:
    """Count what torch.compile compiles inside as `what`'s."""
    before = _graphs()
    yield
    for _ in range(_graphs() - before):
        counter.opened(f"torch.compile: {what}")


def _graphs() -> int:
    module = sys.modules.get("torch._dynamo.utils")
    return 0 if module is None else int(module.counters["stats"]["unique_graphs"])
