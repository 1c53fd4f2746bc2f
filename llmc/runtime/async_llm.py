"""Inference for asyncio programs over a bundle; `llmc.AsyncLLM` adds compiling a checkpoint first."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmc.errors import InputError
from llmc.runtime.async_engine import AsyncEngine, Stream
from llmc.runtime.bundle import Bundle
from llmc.runtime.observer import EngineStats, Observer
from llmc.runtime.opening import EngineOptions, open_executor, open_generator
from llmc.runtime.outputs import CompletionOutput, OutputBuilder, RequestOutput, text_of
from llmc.runtime.prompts import Prompt, Prompts
from llmc.runtime.requests import Request
from llmc.runtime.sampling import RequestOutputKind, SamplingParams


class BundleAsyncLLM:
    """Generates for many callers at once, in continuous batches, with the executables of one bundle.

    Keywords as in BundleLLM. `max_queued_requests` bounds what waits for a slot: more raise OverloadedError.
    """

    def __init__(
        self, bundle: Bundle | str | Path, threads: int | None = None, *, max_queued_requests: int | None = None,
        observer: Observer | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        tokenizer = self.bundle.tokenizer if self.bundle.has_tokenizer else None
        if tokenizer is not None:
            tokenizer.load()
        self._token_text = text_of(tokenizer)
        how = EngineOptions(threads, **options)
        executor = open_executor(self.bundle, how)
        generator = open_generator(self.bundle, executor, how, observer)
        self.engine = AsyncEngine(generator, max_queued_requests, on_close=executor.close)
        self.prompts = Prompts(self.bundle)
        self._ids = itertools.count()
        self._streams: dict[str, Stream] = {}

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None, *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:  # fmt: skip
        """Yield the output as it grows: whole, or with output_kind DELTA what was added, or with FINAL_ONLY once.

        Leaving the generator ends the request. Raises InputError, OverloadedError or EngineDeadError.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise InputError(f"sampling_params must be SamplingParams, not {params!r:.80}")
        name = str(next(self._ids)) if request_id is None else request_id
        request = Request(name, self.prompts.encode(prompt), params, self.bundle.eos_token_ids, priority)
        shown = prompt if isinstance(prompt, str) else None
        stream = await self.engine.open(request)
        self._streams[name] = stream
        builder = OutputBuilder(stream.request, shown, self._token_text)
        try:
            async for updates in stream:
                if params.output_kind is RequestOutputKind.DELTA:
                    _forget(builder.output)
                for update in updates:
                    builder.take(update)
                if builder.output.finished or params.output_kind is not RequestOutputKind.FINAL_ONLY:
                    yield builder.output
        finally:
            self._streams.pop(name, None)
            stream.cancel()

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], sampling_params: SamplingParams | None = None,
        request_id: str | None = None, **template: Any,
    ) -> AsyncGenerator[RequestOutput, None]:  # fmt: skip
        """Answer one conversation; `template` holds keywords of ChatTemplate.render."""
        ids = self.prompts.encode_chat(self.prompts.render(messages, **template))
        async for output in self.generate({"prompt_token_ids": ids}, sampling_params, request_id):
            yield output

    async def abort(self, request_id: str) -> None:
        """End a request; its generator ends with finish_reason "abort". Unknown ids are fine."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.cancel()

    def get_tokenizer(self) -> Any:
        """The model's tokenizer; raises ArtifactError when the bundle has none."""
        return self.bundle.tokenizer

    @property
    def stats(self) -> EngineStats:
        """Gauges of now."""
        return self.engine.stats

    def shutdown(self) -> None:
        """Stop the engine and release executables and cache; requests that still run raise EngineDeadError."""
        self.engine.close()
        self.bundle.files.close()

    async def __aenter__(self) -> BundleAsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.shutdown()


def _forget(output: RequestOutput) -> None:
    """Leave only what comes next."""
    output.outputs = [
        CompletionOutput(c.index, "", [], c.finish_reason, c.stop_reason, c.cumulative_logprob,
                         None if c.logprobs is None else [])
        for c in output.outputs
    ]  # fmt: skip
