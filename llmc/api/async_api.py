"""The Python API for asyncio, separate from api/__init__.py so that offline use does not import asyncio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmc.api import bundle_of
from llmc.api.vllm_arguments import split
from llmc.runtime.async_llm import BundleAsyncLLM


class AsyncEngineArgs:
    """Arguments of AsyncLLM, for `from_engine_args`."""

    def __init__(self, model: str | Path, **arguments: Any) -> None:
        self.arguments = {"model": model, **arguments}


class AsyncLLM(BundleAsyncLLM):
    """llmc.LLM for asyncio, with continuous batching: `async for output in AsyncLLM(model=…).generate(prompt, params)`.

    The constructor opens the bundle, or compiles a checkpoint, and blocks meanwhile: create it before the event loop
    serves requests.
    """

    def __init__(
        self, model: str | Path, *, device: str | None = None, threads: int | None = None,
        weights: str | Path | None = None, **arguments: Any,
    ) -> None:  # fmt: skip
        compiled, engine = split(arguments, device)
        bundle = bundle_of(str(model), device, compiled, weights=None if weights is None else str(weights))
        super().__init__(bundle, threads, **engine)

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> AsyncLLM:
        """Create an instance from arguments, as in vLLM."""
        return cls(**engine_args.arguments)


AsyncLLMEngine = AsyncLLM
