"""llmc: ahead-of-time compilation of LLM graphs.

`llmc.plan(...)`, `llmc.compile(...)`, `llmc.Bundle.open(...)`, `llmc.LLM(...).generate(...)`. Names are imported on
first use, so that `import llmc` is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmc.quiet import silence
from llmc.version import __version__ as __version__
from llmc.waiting import wait_asleep

if TYPE_CHECKING:
    from llmc import buckets as buckets
    from llmc.api import LLM as LLM
    from llmc.api import compile as compile  # noqa: A004
    from llmc.api import plan as plan
    from llmc.api import prepare as prepare
    from llmc.api.async_api import AsyncEngineArgs as AsyncEngineArgs
    from llmc.api.async_api import AsyncLLM as AsyncLLM
    from llmc.api.async_api import AsyncLLMEngine as AsyncLLMEngine
    from llmc.api.measuring import certify as certify
    from llmc.api.measuring import evaluate as evaluate
    from llmc.api.measuring import measure as measure
    from llmc.api.measuring import warm_up as warm_up
    from llmc.runtime.bundle import Bundle as Bundle
    from llmc.runtime.engine.requests import CompletionOutput as CompletionOutput
    from llmc.runtime.engine.requests import RequestOutput as RequestOutput
    from llmc.runtime.engine.sampling.params import GuidedDecodingParams as GuidedDecodingParams
    from llmc.runtime.engine.sampling.params import RequestOutputKind as RequestOutputKind
    from llmc.runtime.engine.sampling.params import SamplingParams as SamplingParams
    from llmc.runtime.engine.sampling.params import StructuredOutputsParams as StructuredOutputsParams

silence()
wait_asleep()
_HOMES = {
    "AsyncEngineArgs": "llmc.api.async_api",
    "AsyncLLM": "llmc.api.async_api",
    "AsyncLLMEngine": "llmc.api.async_api",
    "Bundle": "llmc.runtime.bundle",
    "CompletionOutput": "llmc.runtime.engine.requests",
    "GuidedDecodingParams": "llmc.runtime.engine.sampling",
    "LLM": "llmc.api",
    "RequestOutput": "llmc.runtime.engine.requests",
    "RequestOutputKind": "llmc.runtime.engine.sampling",
    "SamplingParams": "llmc.runtime.engine.sampling",
    "StructuredOutputsParams": "llmc.runtime.engine.sampling",
    "certify": "llmc.api.measuring",
    "compile": "llmc.api",
    "evaluate": "llmc.api.measuring",
    "measure": "llmc.api.measuring",
    "plan": "llmc.api",
    "prepare": "llmc.api",
    "warm_up": "llmc.api.measuring",
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
    "certify",
    "compile",
    "evaluate",
    "measure",
    "plan",
    "prepare",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'llmc' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
