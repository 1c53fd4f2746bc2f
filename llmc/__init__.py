"""llmc: ahead-of-time compilation of LLM graphs.

`llmc.plan(...)`, `llmc.compile(...)`, `llmc.Bundle.open(...)`, `llmc.LLM(...).generate(...)`. Names are imported when
first used, so that `import llmc` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmc.quiet import silence
from llmc.waiting import wait_asleep

if TYPE_CHECKING:
    from llmc import buckets as buckets
    from llmc.api import LLM as LLM
    from llmc.api import compile as compile  # noqa: A004
    from llmc.api import plan as plan
    from llmc.async_api import AsyncEngineArgs as AsyncEngineArgs
    from llmc.async_api import AsyncLLM as AsyncLLM
    from llmc.async_api import AsyncLLMEngine as AsyncLLMEngine
    from llmc.runtime.bundle import Bundle as Bundle
    from llmc.runtime.outputs import CompletionOutput as CompletionOutput
    from llmc.runtime.outputs import RequestOutput as RequestOutput
    from llmc.runtime.sampling import GuidedDecodingParams as GuidedDecodingParams
    from llmc.runtime.sampling import RequestOutputKind as RequestOutputKind
    from llmc.runtime.sampling import SamplingParams as SamplingParams
    from llmc.runtime.sampling import StructuredOutputsParams as StructuredOutputsParams

silence()
wait_asleep()
__version__ = "0.1.0"
_HOMES = {
    "AsyncEngineArgs": "llmc.async_api",
    "AsyncLLM": "llmc.async_api",
    "AsyncLLMEngine": "llmc.async_api",
    "Bundle": "llmc.runtime.bundle",
    "CompletionOutput": "llmc.runtime.outputs",
    "GuidedDecodingParams": "llmc.runtime.sampling",
    "LLM": "llmc.api",
    "RequestOutput": "llmc.runtime.outputs",
    "RequestOutputKind": "llmc.runtime.sampling",
    "SamplingParams": "llmc.runtime.sampling",
    "StructuredOutputsParams": "llmc.runtime.sampling",
    "compile": "llmc.api",
    "plan": "llmc.api",
}
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "Bundle",
    "CompletionOutput",
    "GuidedDecodingParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "compile",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'llmc' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
