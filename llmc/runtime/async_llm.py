"""Inference for asyncio programs over a bundle; `llmc.AsyncLLM` adds compiling a checkpoint first."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.errors import InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.async_engine import AsyncEngine, Stream
from llmc.runtime.engine.observer import EngineStats, Observer
from llmc.runtime.engine.requests import CompletionOutput, OutputBuilder, Request, RequestOutput, text_of
from llmc.runtime.engine.sampling.params import RequestOutputKind, SamplingParams
from llmc.runtime.prompts import Prompt, Prompts
from llmc.runtime.startup.opening import EngineOptions, open_engine, open_executor, warm_up

if TYPE_CHECKING:
    from llmc.runtime.pooling.pooler import AsyncPooler, EmbeddingRequestOutput, ScoringRequestOutput


class BundleAsyncLLM:
    """Generates for many concurrent callers in continuous batches, with the executables of one bundle.

    Keywords are those of BundleLLM. If more than `max_queued_requests` sequences wait for a slot, requests raise
    OverloadedError. Chat templates are rendered in child processes with limits, so a bundle's template cannot block the
    event loop. Over a bundle without a cache, use `embed` or `score`.
    """

    def __init__(
        self, bundle: Bundle | str | Path, threads: int | None = None, *, max_queued_requests: int | None = None,
        observer: Observer | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        self._ids = itertools.count()
        self._streams: dict[str, Stream] = {}
        self._pooler: AsyncPooler | None = None
        how = EngineOptions(threads, **options)
        if self.bundle.task != "generate":
            from llmc.runtime.pooling.pooler import WAITING, AsyncPooler, Pooler

            most = WAITING if max_queued_requests is None else max_queued_requests
            pooler = Pooler(self.bundle, threads)
            if how.warm_up:
                from llmc.runtime.startup.pool_warming import warm_pooler

                warm_pooler(pooler)
            self._pooler = AsyncPooler(pooler, most)
            return
        tokenizer = self.bundle.tokenizer if self.bundle.has_tokenizer else None
        if tokenizer is not None:
            tokenizer.load()
        self._token_text = text_of(tokenizer)
        executor = open_executor(self.bundle, how)
        try:
            warm_up(executor, how)
            engine = open_engine(self.bundle, executor, how, observer)
        except BaseException:
            executor.close()
            raise
        self.engine = AsyncEngine(engine, max_queued_requests, on_close=executor.close)
        self.prompts = Prompts(self.bundle)

    @property
    def pooler(self) -> AsyncPooler:
        """The pooler of an embedding or scoring bundle; raises InputError for a bundle that generates."""
        if self._pooler is None:
            _ = self.bundle.encode_plan
        assert self._pooler is not None  # encode_plan raised
        return self._pooler

    async def embed(
        self, prompts: str | list[int] | Sequence[str | list[int]], *, prompt_name: str | None = None,
        prompt: str | None = None, dimensions: int | None = None, truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:  # fmt: skip
        """Embed texts like BundleLLM.embed, concurrently with other callers.

        Raises InputError, and OverloadedError if too many calls wait.
        """
        from llmc.runtime.pooling.pooler import embeddings

        how = {
            "prompt_name": prompt_name, "prompt": prompt, "dimensions": dimensions, "cut": truncate_prompt_tokens
        }  # fmt: skip
        return await self.pooler.run(lambda pooler: embeddings(pooler, prompts, **how))

    async def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], *, truncate_prompt_tokens: int | None = None
    ) -> list[ScoringRequestOutput]:
        """Score texts like BundleLLM.score, concurrently with other callers.

        Raises InputError, and OverloadedError if too many calls wait.
        """
        from llmc.runtime.pooling.pooler import scores

        return await self.pooler.run(lambda pooler: scores(pooler, data_1, data_2, truncate_prompt_tokens))

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None, *,
        priority: int = 0, lora: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:  # fmt: skip
        """Yield the output as it grows: cumulative by default, the new part with DELTA, once with FINAL_ONLY.

        `lora` names the adapter to use; None selects the base model. Closing the generator cancels the request. Raises
        InputError, OverloadedError, EngineDeadError, or DeviceError if the device failed for this request only.
        """
        if self._pooler is not None:
            _ = self.bundle.plan  # raises for a bundle that does not generate
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise InputError(f"sampling_params must be SamplingParams, not {params!r:.80}")
        name, adapter = str(next(self._ids)) if request_id is None else request_id, self.bundle.adapter(lora)
        request = Request(name, await self._encoded(prompt), params, self.bundle.eos_token_ids, priority, adapter)
        shown = prompt if isinstance(prompt, str) else None
        stream = await self.engine.open(request)
        self._streams[name] = stream
        builder = OutputBuilder(stream.request, shown, self._token_text)
        try:
            async for updates in stream:
                if params.output_kind is RequestOutputKind.DELTA:
                    _forget(builder.output)
                for update in updates:
                    if update.error is not None:
                        raise update.error
                    builder.take(update)
                if builder.output.finished or params.output_kind is not RequestOutputKind.FINAL_ONLY:
                    yield builder.output
        finally:
            self._streams.pop(name, None)
            stream.cancel()

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], sampling_params: SamplingParams | None = None,
        request_id: str | None = None, *, lora: str | None = None, **template: Any,
    ) -> AsyncGenerator[RequestOutput, None]:  # fmt: skip
        """Answer one conversation.

        `lora` is as for `generate`; `template` holds keywords of ChatTemplate.render.
        """
        if self._pooler is not None:
            _ = self.bundle.plan  # raises for a bundle that does not generate
        ids = await self._conversation(messages, **template)
        async for output in self.generate({"prompt_token_ids": ids}, sampling_params, request_id, lora=lora):
            yield output

    async def _encoded(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, Mapping) and "messages" in prompt and "prompt_token_ids" not in prompt:
            return await self._conversation(prompt["messages"])
        return self.prompts.encode(prompt)

    async def _conversation(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> list[int]:
        text = await self.prompts.rendered(messages, **how)
        return self.prompts.encode_chat(text)

    async def abort(self, request_id: str) -> None:
        """Cancel a request; its generator ends with finish_reason "abort". Unknown ids are ignored."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.cancel()

    def get_tokenizer(self) -> Any:
        """The model's tokenizer; raises ArtifactError when the bundle has none."""
        return self.bundle.tokenizer

    @property
    def stats(self) -> EngineStats:
        """Current gauges."""
        return self.engine.stats if self._pooler is None else self._pooler.stats

    def shutdown(self) -> None:
        """Stop the engine and release executables and cache; running requests raise EngineDeadError."""
        if self._pooler is not None:
            self._pooler.close()
            return
        self.engine.close()
        self.prompts.close()
        self.bundle.files.close()

    async def __aenter__(self) -> BundleAsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.shutdown()


def _forget(output: RequestOutput) -> None:
    output.outputs = [
        CompletionOutput(c.index, "", [], c.finish_reason, c.stop_reason, c.cumulative_logprob,
                         None if c.logprobs is None else [])
        for c in output.outputs
    ]  # fmt: skip
