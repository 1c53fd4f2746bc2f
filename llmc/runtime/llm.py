"""Offline inference over a bundle; `llmc.LLM` adds compiling a checkpoint first.

Nothing of the engine is imported at the top: that happens while the executor opens, see starting.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from llmc.errors import InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.startup.opening import EngineOptions, warm_up
from llmc.runtime.startup.overlapped import StartingExecutor

if TYPE_CHECKING:
    from llmc.runtime.engine.core import EngineCore
    from llmc.runtime.engine.engine import LLMEngine
    from llmc.runtime.engine.observer import Observer, StepRecord
    from llmc.runtime.engine.requests import RequestOutput, Update
    from llmc.runtime.engine.sampling.params import SamplingParams
    from llmc.runtime.executors.base import Executor
    from llmc.runtime.pooling.pooler import EmbeddingRequestOutput, Pooler, ScoringRequestOutput
    from llmc.runtime.prompts import Prompt, Prompts
    from llmc.runtime.text.tokenizer import Tokenizer

_BAR_AFTER_S = 2.0


class BundleLLM:
    """Generates with the executables of one bundle, and never compiles. Not thread-safe. Over a bundle without a cache
    it embeds (`embed`) or scores (`score`), and generates nothing.

    `bundle` is a folder or an opened Bundle. With `keep_steps` each output carries a record of every step it took part
    in. `seed` makes unseeded requests repeatable. `observer` is told of requests and steps; further keywords are those
    of EngineOptions. Raises ArtifactError or DeviceError when the bundle cannot run here.
    """

    def __init__(
        self, bundle: Bundle | str | Path, threads: int | None = None, keep_steps: bool = False, *,
        seed: int | None = None, observer: Observer | None = None, **options: Any,
    ) -> None:  # fmt: skip
        how = EngineOptions(threads, **options)
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        self._pooler: Pooler | None = None
        if self.bundle.task != "generate":
            from llmc.runtime.pooling.pooler import Pooler

            self._pooler = Pooler(self.bundle, threads)
            if how.warm_up:
                from llmc.runtime.startup.pool_warming import warm_pooler

                warm_pooler(self._pooler)
            return
        opening = StartingExecutor(self.bundle, how)
        try:
            from llmc.runtime.offline import Offline
            from llmc.runtime.prompts import Prompts

            self.prompts: Prompts = Prompts(self.bundle)
            self.prompts.prepare()
            self.executor: Executor = opening.executor
            warm_up(self.executor, how)
            self._offline = Offline(
                self.bundle, self.executor, how, self.prompts, keep_steps=keep_steps, seed=seed, observer=observer
            )
        except BaseException:
            opening.abandon()
            raise

    @property
    def pooler(self) -> Pooler:
        """What embeds or scores; raises InputError over a bundle that generates."""
        if self._pooler is None:
            raise InputError(
                f"{self.bundle.path}: a bundle to generate text, which neither embeds nor scores; compile a checkpoint "
                "for that with --task embed or --task score"
            )
        return self._pooler

    def embed(
        self, prompts: str | list[int] | Sequence[str | list[int]], *, prompt_name: str | None = None,
        prompt: str | None = None, dimensions: int | None = None, truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:  # fmt: skip
        """A vector of each text or list of token ids, as the checkpoint's sentence-transformers files say.

        `prompt`, or the checkpoint's own of that name, goes before each; `dimensions` is how many numbers of a
        Matryoshka model's vectors are kept; longer texts are cut at the model's length, or at
        `truncate_prompt_tokens`. Raises InputError.
        """
        from llmc.runtime.pooling.pooler import embeddings

        return embeddings(
            self.pooler, prompts, prompt_name=prompt_name, prompt=prompt, dimensions=dimensions,
            cut=truncate_prompt_tokens,
        )  # fmt: skip

    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], *, truncate_prompt_tokens: int | None = None
    ) -> list[ScoringRequestOutput]:
        """How well each of `data_2` fits `data_1`, one text for all of them or one each. Raises InputError."""
        from llmc.runtime.pooling.pooler import scores

        return scores(self.pooler, data_1, data_2, truncate_prompt_tokens)

    @property
    def engine(self) -> LLMEngine:
        """The engine, which takes requests; raises InputError over a bundle that generates nothing."""
        if self._pooler is not None:
            _ = self.bundle.plan
        return self._offline.engine

    @property
    def core(self) -> EngineCore:
        """The engine, which runs the requests' sequences, token by token."""
        return self._offline.engine.core

    @property
    def records(self) -> list[StepRecord]:
        """The steps of the last call, where they are kept."""
        return self._offline.records

    @property
    def compilations(self) -> int:
        """Compilations since the bundle was opened, as its executor counts: 0, unless something was missing from it."""
        if self._pooler is not None:
            return self._pooler.encoder.compilations.count
        prefiller = self.core.prefiller
        return self.executor.compilations.count + (0 if prefiller is None else prefiller.compilations)

    @property
    def compilations_at_open(self) -> tuple[str, ...]:
        """What the device's toolchain compiled when the bundle was opened (OpenVINO's models)."""
        opened = self.executor if self._pooler is None else self._pooler.encoder
        return opened.compilations.at_open

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises ArtifactError when the bundle has none."""
        return self.bundle.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters used when none are given."""
        from llmc.runtime.engine.sampling.params import SamplingParams

        return SamplingParams()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, of {"prompt": text}, {"prompt_token_ids": ids} or {"messages": [...]}, or as given."""
        return self.prompts.encode(prompt)

    def render(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> str:
        """The chat template's text for `messages`, ready for an answer."""
        return self.prompts.render(messages, **how)

    def stream(
        self, prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
        priority: Sequence[int] | None = None, lora: str | Sequence[str | None] | None = None,
    ) -> Iterator[tuple[int, Update, RequestOutput]]:  # fmt: skip
        """Yield (prompt index, update, output so far) as text becomes certain; the output's `finished` says its end.

        A text, an object or a list of token ids is one prompt, with index 0. `lora`: as `generate` has it.

        Updates' texts joined equal the output's text. Leaving the iterator early ends what still runs.
        """
        from llmc.runtime.prompts import several

        _ = self.engine
        return self._offline.stream(several(prompts), sampling_params, priority, lora)

    def generate(
        self, prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *, use_tqdm: bool = True,
        priority: Sequence[int] | None = None, lora: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Continue every prompt; outputs in the order of `prompts`. Raises InputError for a prompt that cannot run.

        `lora`: the name of the bundle's adapter that continues them, or one name for each, None for the base model.
        With `use_tqdm` a terminal shows a bar with ETA for what takes over two seconds.
        """
        from llmc.runtime.prompts import several

        _ = self.engine
        given = several(prompts)
        outputs: dict[int, RequestOutput] = {}
        with _Bar(len(given), use_tqdm) as bar:
            for index, _, output in self._offline.stream(given, sampling_params, priority, lora):
                if output.finished:
                    outputs[index] = output
                bar.show(len(outputs))
        return [outputs[i] for i in range(len(given))]

    def chat(
        self, messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *, use_tqdm: bool = True,
        add_generation_prompt: bool = True, tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None, chat_template_kwargs: Mapping[str, Any] | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Answer one conversation, or several; `chat_template` replaces the model's own. `lora`: as for `generate`."""
        _ = self.engine
        from llmc.runtime.prompts import conversations

        template = None if chat_template is None else self.prompts.template_of(chat_template)
        how = {"add_generation_prompt": add_generation_prompt, "tools": tools, "variables": chat_template_kwargs}
        try:
            texts = [self.prompts.render(m, template, **how) for m in conversations(messages)]
        finally:
            if template is not None:
                template.close()
        prompts = [{"prompt_token_ids": self.prompts.encode_chat(text)} for text in texts]
        outputs = self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora=lora)
        for output, text in zip(outputs, texts, strict=True):
            output.prompt = text
        return outputs

    def close(self) -> None:
        """Release executables and cache, and save what was verified."""
        if self._pooler is not None:
            self._pooler.close()
            return
        self._offline.engine.close()
        self.executor.close()
        self.prompts.close()
        self.bundle.files.close()

    def __enter__(self) -> BundleLLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


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
