"""Offline inference over a bundle; `llmc.LLM` adds compiling a checkpoint first."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from llmc.errors import InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.compilations import COMPILATIONS
from llmc.runtime.observer import Observer, Observers, StepRecord
from llmc.runtime.opening import EngineOptions, open_executor, open_generator
from llmc.runtime.outputs import OutputBuilder, RequestOutput, text_of
from llmc.runtime.prompts import Prompt, Prompts
from llmc.runtime.requests import Request, Update
from llmc.runtime.sampling import SamplingParams

if TYPE_CHECKING:
    from llmc.runtime.tokenizer import Tokenizer

_BAR_AFTER_S = 2.0


class BundleLLM:
    """Generates with the executables of one bundle, and never compiles. Not thread-safe.

    `bundle` is a folder or an opened Bundle. With `keep_steps` each output carries a record of every step it took part
    in. `seed` makes unseeded requests repeatable. `observer` is told of requests and steps; further keywords are those
    of EngineOptions. Raises ArtifactError or DeviceError when the bundle cannot run here.
    """

    def __init__(
        self, bundle: Bundle | str | Path, threads: int | None = None, keep_steps: bool = False, *,
        seed: int | None = None, observer: Observer | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        self._compiled_before = COMPILATIONS.count
        has_tokenizer = "tokenizer.json" in self.bundle.manifest.files
        self._token_text = text_of(self.bundle.tokenizer if has_tokenizer else None)
        how = EngineOptions(threads, **options)
        self.executor = open_executor(self.bundle, how)
        try:
            self._warm()
        except BaseException:
            self.executor.close()
            raise
        self.records: list[StepRecord] = []
        watchers = [o for o in (_Keeper(self.records) if keep_steps else None, observer) if o is not None]
        self.generator = open_generator(self.bundle, self.executor, how, Observers(watchers))
        self.engine = self.generator.engine
        self.prompts = Prompts(self.bundle)
        self._seed = seed
        self._ids = itertools.count()

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

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises ArtifactError when the bundle has none."""
        return self.bundle.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where no parameters are given."""
        return SamplingParams()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, of {"prompt": text}, {"prompt_token_ids": ids} or {"messages": [...]}, or as given."""
        return self.prompts.encode(prompt)

    def render(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> str:
        """The chat template's text for `messages`, ready for an answer."""
        return self.prompts.render(messages, **how)

    def stream(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *, priority: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, Update, RequestOutput]]:  # fmt: skip
        """Yield (prompt index, update, output so far) as text becomes certain; the output's `finished` says its end.

        Updates' texts joined equal the output's text. Leaving the iterator early ends what still runs.
        """
        started = time.perf_counter()
        prepared = [
            self.generator.prepare(self._request(prompt, params, rank))
            for prompt, params, rank in zip(
                prompts, _per_prompt(sampling_params, len(prompts)),
                _per_priority(priority, len(prompts)), strict=True,
            )
        ]  # fmt: skip
        self.records.clear()
        builders: dict[str, tuple[int, OutputBuilder]] = {}
        owners: dict[int, RequestOutput] = {}
        for index, (prompt, one) in enumerate(zip(prompts, prepared, strict=True)):
            shown = prompt if isinstance(prompt, str) else None
            builder = OutputBuilder(one.request, shown, self._token_text, started)
            builders[one.request.request_id] = (index, builder)
            owners |= dict.fromkeys(self.generator.add(one), builder.output)
        try:
            while any(not b.output.finished for _, b in builders.values()):
                recorded = len(self.records)
                updates = self.generator.step()
                for record in self.records[recorded:]:
                    for sequence in record.requests:
                        if sequence in owners:
                            owners[sequence].steps.append(record)
                for update in updates:
                    if update.request_id in builders:
                        index, builder = builders[update.request_id]
                        builder.take(update)
                        yield index, update, builder.output
        finally:
            for request_id in builders:
                self.generator.cancel(request_id)

    def _request(self, prompt: Prompt, params: SamplingParams, priority: int) -> Request:
        number = next(self._ids)
        if self._seed is not None and params.seed is None:
            params = replace(params, seed=self._seed + number)
        return Request(str(number), self.encode(prompt), params, self.bundle.eos_token_ids, priority)

    def generate(
        self, prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *, use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Continue every prompt; outputs in the order of `prompts`. Raises InputError for a prompt that cannot run.

        With `use_tqdm` a terminal shows a bar with ETA for what takes over two seconds.
        """
        single = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
        several: Sequence[Prompt] = [prompts] if single else prompts  # type: ignore[assignment,list-item]
        outputs: dict[int, RequestOutput] = {}
        with _Bar(len(several), use_tqdm) as bar:
            for index, _, output in self.stream(several, sampling_params, priority=priority):
                if output.finished:
                    outputs[index] = output
                bar.show(len(outputs))
        return [outputs[i] for i in range(len(several))]

    def chat(
        self, messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *, use_tqdm: bool = True,
        add_generation_prompt: bool = True, tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None, chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Answer one conversation, or several; `chat_template` replaces the model's own."""
        several: Any = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        template = self.prompts.template
        if chat_template is not None:
            from llmc.runtime.chat import ChatTemplate

            template = ChatTemplate(chat_template, self.bundle.special_tokens)
        texts = [
            template.render(m, add_generation_prompt=add_generation_prompt, tools=tools, variables=chat_template_kwargs)
            for m in several
        ]
        prompts = [{"prompt_token_ids": self.prompts.encode_chat(text)} for text in texts]
        outputs = self.generate(prompts, sampling_params, use_tqdm=use_tqdm)
        for output, text in zip(outputs, texts, strict=True):
            output.prompt = text
        return outputs

    def close(self) -> None:
        """Release executables and cache, and save what was verified."""
        self.executor.close()
        self.bundle.files.close()

    def __enter__(self) -> BundleLLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class _Keeper(Observer):
    """Keeps step records."""

    def __init__(self, records: list[StepRecord]) -> None:
        self._records = records

    def stepped(self, record: StepRecord) -> None:
        self._records.append(record)


class _Bar:
    """A bar with ETA over finished prompts, on a terminal, once a call takes long."""

    def __init__(self, total: int, wanted: bool) -> None:
        self._total = total
        self._wanted = wanted and sys.stderr.isatty()
        self._began = time.monotonic()
        self._progress: Any = None

    def __enter__(self) -> _Bar:
        return self

    def show(self, done: int) -> None:
        """So many prompts are finished."""
        if not self._wanted or time.monotonic() - self._began < _BAR_AFTER_S:
            return
        if self._progress is None:
            from rich.console import Console
            from rich.progress import Progress

            self._progress = Progress(console=Console(stderr=True), transient=True)
            self._progress.add_task("prompts", total=self._total)
            self._progress.start()
        self._progress.update(0, completed=done)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InputError(f"{len(params)} sampling parameters for {count} prompts")
    return list(params)


def _per_priority(priority: Sequence[int] | None, count: int) -> list[int]:
    if priority is None:
        return [0] * count
    if len(priority) != count:
        raise InputError(f"{len(priority)} priorities for {count} prompts")
    return list(priority)
