"""llmc: ahead-of-time compilation of LLM graphs.

`llmc.plan(...)`, `llmc.compile(...)`, `llmc.Bundle.open(...)`, `llmc.LLM(...).generate(...)`. Names are imported when
first used, so that `import llmc` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc import buckets as buckets
    from llmc.api import LLM as LLM
    from llmc.api import compile as compile  # noqa: A004
    from llmc.api import plan as plan
    from llmc.runtime.bundle import Bundle as Bundle
    from llmc.runtime.sampling import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Bundle", "SamplingParams", "compile", "plan"]

_HOMES = {
    "LLM": "llmc.api",
    "compile": "llmc.api",
    "plan": "llmc.api",
    "Bundle": "llmc.runtime.bundle",
    "SamplingParams": "llmc.runtime.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'llmc' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
