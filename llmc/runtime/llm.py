"""Offline inference over a bundle; `llmc.LLM` adds compiling a checkpoint first."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from llmc.errors import InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.compilations import COMPILATIONS
from llmc.runtime.engine import Engine, Request, StepRecord, TokenEvent
from llmc.runtime.outputs import CompletionOutput, RequestOutput, Timings
from llmc.runtime.sampling import SamplingParams
from llmc.runtime.tokenizer import StopChecker, StreamDetokenizer

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]


class BundleLLM:
    """Generates with the executables of one bundle, and never compiles.

    `bundle` is a folder or an opened Bundle; `threads` defaults to LLMC_THREADS or the CPUs this process may use. With
    `keep_steps` each output carries a record of every step it took part in. Raises ArtifactError or DeviceError when
    the bundle cannot run here.
    """

    def __init__(self, bundle: Bundle | str | Path, threads: int | None = None, keep_steps: bool = False) -> None:
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        self._compiled_before = COMPILATIONS.count
        if "tokenizer.json" in self.bundle.manifest.files:
            _ = self.bundle.tokenizer
        self.executor = self.bundle.executor(threads=threads)
        try:
            self._warm()
        except BaseException:
            self.executor.close()
            raise
        vocab_size = int(self.bundle.manifest.model["vocab_size"])
        self.engine = Engine(self.bundle.plan, self.executor, vocab_size, keep_steps)

    def _warm(self) -> None:
        plan = self.bundle.plan
        first = min(plan.prompt, key=lambda b: (b.tokens, b.context))
        decode = plan.lookup("decode", 1, 1, first.query)
        shapes = [first] + ([decode] if decode else [])
        self.executor.warm([(b.phase, b.batch, b.query, b.context) for b in shapes])

    @property
    def compilations(self) -> int:
        """Compilations in this process since the bundle was opened: 0, unless something was missing from it."""
        return COMPILATIONS.count - self._compiled_before

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, of {"prompt": text}, {"prompt_token_ids": ids} or {"messages": [...]}, or as given."""
        if isinstance(prompt, str):
            return self.bundle.tokenizer.encode(prompt)
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return list(prompt["prompt_token_ids"])
            if "messages" in prompt:
                return self.bundle.tokenizer.encode(self.render(prompt["messages"]), add_special_tokens=False)
            if isinstance(prompt.get("prompt"), str):
                return self.encode(prompt["prompt"])
            raise InputError(f"a prompt object needs 'prompt', 'prompt_token_ids' or 'messages', not {sorted(prompt)}")
        return [int(t) for t in prompt]

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The chat template's text for `messages`, ready for an answer."""
        from llmc.runtime.chat import ChatTemplate

        return ChatTemplate(self.bundle.chat_template, self.bundle.special_tokens).render(messages)

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[tuple[int, str, TokenEvent | None, RequestOutput | None]]:
        """Yield (prompt index, new text, token event, output) as text becomes certain; output is set at the end.

        A finished prompt's last item carries its RequestOutput. Texts joined equal the output's text.
        """
        started = time.perf_counter()
        every = _per_prompt(params, len(prompts))
        ids = [self.encode(p) for p in prompts]
        ends = self.bundle.eos_token_ids
        requests = [Request(i, p, ends) for i, p in zip(ids, every, strict=True)]
        self.engine.records.clear()
        self.engine.steps = 0
        states = [_Text(self, r) for r in requests]
        recorded = 0
        for event in self.engine.generate(requests):
            for record in self.engine.records[recorded : event.step + 1]:
                for index in record.requests:
                    states[index].steps.append(record)
            recorded = event.step + 1
            state = states[event.index]
            text, stopped = state.feed(event, time.perf_counter() - started)
            if stopped:
                self.engine.cancel(event.index)
            finished = state.reason is not None
            output = None
            if finished:
                prompt = prompts[event.index]
                output = state.output(prompt if isinstance(prompt, str) else None)
            yield event.index, text, event, output

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Continue every prompt; outputs in the order of `prompts`. Raises InputError for a prompt that cannot run."""
        single = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
        several: Sequence[Prompt] = [prompts] if single else prompts  # type: ignore[assignment,list-item]
        outputs = {i: out for i, _, _, out in self.stream(several, params) if out}
        return [outputs[i] for i in range(len(several))]

    def chat(
        self, messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Answer one conversation, or several."""
        several = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        return self.generate([{"messages": m} for m in several], params)

    def close(self) -> None:
        """Release executables and cache, and save what was verified."""
        self.executor.close()
        self.bundle.files.close()

    def __enter__(self) -> BundleLLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class _Text:
    """The text of one request as its tokens arrive."""

    def __init__(self, llm: BundleLLM, request: Request) -> None:
        self._request = request
        self._ids: list[int] = []
        self._parts: list[str] = []
        self.steps: list[StepRecord] = []
        self._first_s = 0.0
        self._last_s = 0.0
        self.reason: Any = None
        has_tokenizer = "tokenizer.json" in llm.bundle.manifest.files
        self._detokenizer = StreamDetokenizer(llm.bundle.tokenizer) if has_tokenizer else None
        self._stop = StopChecker(request.params.stop_strings)

    def feed(self, event: TokenEvent, elapsed: float) -> tuple[str, bool]:
        """Take one token; returns the new certain text, and whether a stop string ended the text."""
        self._first_s = self._first_s or elapsed
        self._last_s = elapsed
        self._ids.append(event.token_id)
        self.reason = event.finish_reason
        if self._detokenizer is None:
            return "", False
        ends = event.finish_reason == "stop"  # the token that says so is no text
        text = "" if ends else self._stop.feed(self._detokenizer.feed(event.token_id))
        if event.finish_reason and self._stop.matched is None:
            text += self._stop.feed(self._detokenizer.flush())
            if self._stop.matched is None:
                text += self._stop.flush()
        if self._stop.matched is not None:
            self.reason = "stop"
        self._parts.append(text)
        return text, self._stop.matched is not None

    def output(self, prompt: str | None) -> RequestOutput:
        """The finished request."""
        completion = CompletionOutput(0, "".join(self._parts), self._ids, self.reason)
        timings = Timings(self._first_s, self._last_s)
        return RequestOutput(prompt, list(self._request.prompt_token_ids), [completion], timings, self.steps)


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InputError(f"{len(params)} sampling parameters for {count} prompts")
    return list(params)
