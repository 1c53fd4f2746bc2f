"""Offline inference over a bundle; `llmc.LLM` can also compile a checkpoint first.

The engine is not imported at the top. It is imported while the executor opens (starting.py).
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
    """Generates with the executables of one bundle, and never compiles. Not thread-safe.

    `bundle` is a folder or an opened Bundle. With `keep_steps`, each output has a record of every step it took part in.
    `seed` makes unseeded requests repeatable. `observer` receives request and step events. Further keywords are those
    of EngineOptions. A bundle without a cache supports `embed` or `score` instead of generation. Raises ArtifactError
    or DeviceError if the bundle cannot run here.
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
        """The pooler of an embedding or scoring bundle; raises InputError for a bundle that generates."""
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
        """Embed each text or list of token ids by the checkpoint's sentence-transformers configuration.

        `prompt`, or the checkpoint's prompt called `prompt_name`, is prepended to each text. `dimensions` truncates the
        vectors of a Matryoshka model. Texts are cut at `truncate_prompt_tokens`, or at the model's length. Raises
        InputError.
        """
        from llmc.runtime.pooling.pooler import embeddings

        return embeddings(
            self.pooler, prompts, prompt_name=prompt_name, prompt=prompt, dimensions=dimensions,
            cut=truncate_prompt_tokens,
        )  # fmt: skip

    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], *, truncate_prompt_tokens: int | None = None
    ) -> list[ScoringRequestOutput]:
        """Score how well each of `data_2` matches `data_1`, one text for all or one each. Raises InputError."""
        from llmc.runtime.pooling.pooler import scores

        return scores(self.pooler, data_1, data_2, truncate_prompt_tokens)

    @property
    def engine(self) -> LLMEngine:
        """The engine that takes requests; raises InputError for a bundle that does not generate."""
        if self._pooler is not None:
            _ = self.bundle.plan
        return self._offline.engine

    @property
    def core(self) -> EngineCore:
        """The engine core, which runs the requests' sequences token by token."""
        return self._offline.engine.core

    @property
    def records(self) -> list[StepRecord]:
        """Step records of the last call, if `keep_steps` is set."""
        return self._offline.records

    @property
    def compilations(self) -> int:
        """Compilations since the bundle was opened, by its executor's count. 0 unless the bundle lacked something."""
        if self._pooler is not None:
            return self._pooler.encoder.compilations.count
        prefiller = self.core.prefiller
        return self.executor.compilations.count + (0 if prefiller is None else prefiller.compilations)

    @property
    def compilations_at_open(self) -> tuple[str, ...]:
        """Names of what the device's toolchain compiled when the bundle was opened (OpenVINO's models)."""
        opened = self.executor if self._pooler is None else self._pooler.encoder
        return opened.compilations.at_open

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises ArtifactError when the bundle has none."""
        return self.bundle.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The default parameters with what the checkpoint's generation_config.json recommends, as in vLLM."""
        from llmc.runtime.engine.sampling.params import SamplingParams, recommended

        return SamplingParams().filled(recommended(self.bundle.sampling))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, {"prompt": text}, {"prompt_token_ids": ids}, {"messages": [...]} or a list of ids."""
        return self.prompts.encode(prompt)

    def render(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> str:
        """Render `messages` with the chat template, ready for an answer."""
        return self.prompts.render(messages, **how)

    def stream(
        self, prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
        priority: Sequence[int] | None = None, lora: str | Sequence[str | None] | None = None,
    ) -> Iterator[tuple[int, Update, RequestOutput]]:  # fmt: skip
        """Yield (prompt index, update, output so far) as text becomes final. The last output has `finished` set.

        A text, an object or a list of token ids is one prompt with index 0. `lora` is as for `generate`. The updates'
        texts concatenate to the output's text. Closing the iterator cancels what still runs.
        """
        from llmc.runtime.prompts import several

        _ = self.engine
        return self._offline.stream(several(prompts), sampling_params, priority, lora)

    def generate(
        self, prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *, use_tqdm: bool = True,
        priority: Sequence[int] | None = None, lora: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Continue every prompt; outputs are in the order of `prompts`. Raises InputError for a prompt that cannot run.

        `lora` is the name of the adapter, or one name for each prompt; None selects the base model. With `use_tqdm`, a
        terminal shows a progress bar for calls that take over two seconds.
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
        """Answer one conversation or several. `chat_template` replaces the model's own; `lora` is as for `generate`."""
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
        """Release executables and cache, and save verification results."""
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
    """A progress bar over finished prompts, shown on a terminal once a call takes long."""

    def __init__(self, total: int, wanted: bool) -> None:
        self._total = total
        self._wanted = wanted and sys.stderr.isatty()
        self._began = time.monotonic()
        self._progress: Any = None

    def __enter__(self) -> _Bar:
        return self

    def show(self, done: int) -> None:
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
