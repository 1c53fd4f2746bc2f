"""The Python surface for asyncio; apart from api/__init__.py, so that offline use does not import asyncio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmc.api import bundle_of
from llmc.api.vllm_arguments import split
from llmc.runtime.async_llm import BundleAsyncLLM


class AsyncEngineArgs:
    """Arguments of AsyncLLM, kept for `from_engine_args`."""

    def __init__(self, model: str | Path, **arguments: Any) -> None:
        self.arguments = {"model": model, **arguments}


class AsyncLLM(BundleAsyncLLM):
    """As llmc.LLM, in continuous batches for asyncio: `async for output in AsyncLLM(model=…).generate(prompt, params)`.

    Opening, and compiling a checkpoint, happen here and take their time: make it before the event loop serves others.
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
        """vLLM's way to make one."""
        return cls(**engine_args.arguments)


AsyncLLMEngine = AsyncLLM
