"""Several engines asked in turn, round by round: what all measurements share.

Each round asks every engine, so that a host that gets slower does so for all. Each round begins with another engine, so
that no engine always follows the same one: with n engines, round t begins with number t mod n. A contender that fails
is left out of that measurement, which says why; one that does not even open, of all that need it open.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from baselines.results import Series
from baselines.worker import Contender, Worker
from llmc.errors import LlmcError

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many questions are answered, and of how many."""

T = TypeVar("T")

ROOM = 128
"""Tokens that an engine with a fixed cache gets beyond the longest prompt."""


@dataclass(frozen=True)
class Opened:
    """Workers that are open, and why the others are not."""

    workers: list[Worker]
    failed: dict[str, str]


class Rounds:
    """Contenders that are asked in turn, with `threads` threads each. `total`: how many questions there will be."""

    def __init__(
        self, contenders: Sequence[Contender], threads: int, vocabulary: int, logs: Path, total: int,
        progress: Progress,
    ) -> None:  # fmt: skip
        self.contenders, self.threads, self.vocabulary, self.logs = list(contenders), threads, vocabulary, logs
        self.abouts: dict[str, dict[str, Any]] = {}
        self.tuned: dict[tuple[str, str], Mapping[str, Any]] = {}
        self._progress = progress
        self._done, self._total = 0, total

    def on_progress(self, words: str) -> None:
        """One more question is answered."""
        self._done = min(self._done + 1, self._total)
        self._progress(words, self._done, self._total)

    @contextmanager
    def open(self, use: str = "", **sizes: int) -> Iterator[Opened]:
        """All contenders' processes at once; `sizes` as in `settings`, `use` as in tuning.py."""
        opened, interrupted = Opened([], {}), False
        try:
            for contender in self.contenders:
                try:
                    options = settings(contender, **sizes) | dict(self.tuned.get((contender.name, use), {}))
                    worker = Worker(contender, self.threads, self.log(contender), **options)
                except LlmcError as error:
                    opened.failed[contender.name] = str(error)
                    continue
                opened.workers.append(worker)
                try:
                    self.warm(worker)
                except LlmcError as error:
                    opened.failed[contender.name] = str(error)
            yield opened
        except BaseException as error:
            interrupted = not isinstance(error, Exception)
            raise
        finally:
            for worker in opened.workers:
                worker.close(at_once=interrupted)

    def warm(self, worker: Worker) -> None:
        """Hear what the engine is, and have it ready."""
        self.abouts[worker.name] = worker.ask("about")
        worker.ask("warm")

    def log(self, contender: Contender) -> Path:
        """Where a contender's output goes."""
        return self.logs / ("".join(c if c.isalnum() else "-" for c in contender.name) + ".log")

    def ids(self, seed: str, length: int) -> list[int]:
        """Random token ids, the same for the same seed."""
        return random.Random(seed).choices(range(self.vocabulary), k=length)

    def ask(
        self, opened: Opened, series: Sequence[Series], rounds: int, ask: Callable[[Worker, int], Sequence[float]]
    ) -> None:
        """Ask each worker in each round for a figure of each of the series; the first round, 0, only warms."""
        failed = dict(opened.failed)
        for turn in range(rounds + 1):
            order = in_turn(opened.workers, turn)
            if turn:
                for one in series:
                    one.orders.append([worker.name for worker in order if worker.name not in failed])
            for worker in order:
                if worker.name not in failed:
                    try:
                        figures = ask(worker, turn)
                    except LlmcError as error:
                        failed[worker.name] = str(error)
                    else:
                        for one, figure in zip(series, figures, strict=True):
                            if turn:
                                one.add(worker.name, figure)
                self.on_progress(f"{series[0].name}: {worker.name}")
        for name, why in failed.items():
            for one in series:
                one.drop(name, why)

    def check(self, worker: Worker, sequences: int, prompt: int, more: int) -> None:
        """Raise for a bundle that was not compiled for so many sequences of so many tokens, prompt and answer."""
        about, length = self.abouts[worker.name], prompt + more
        if sequences > about.get("sequences", sequences):
            raise LlmcError(f"the bundle runs {about['sequences']} sequences at a time")
        if prompt > about.get("prompt", prompt):
            raise LlmcError(f"the bundle takes prompts of {about['prompt']} tokens")
        if length > about.get("length", length):
            raise LlmcError(f"the bundle takes {about['length']} tokens")


def in_turn(every: Sequence[T], turn: int) -> list[T]:
    """All in their order, beginning with number `turn`, round and round."""
    first = turn % len(every) if every else 0
    return [*every[first:], *every[:first]]


def settings(
    contender: Contender, sequences: int, length: int, batched_tokens: int | None = None
) -> dict[str, Any]:  # fmt: skip
    """Options to open an engine with for this many sequences of this many tokens, if it needs them.

    `batched_tokens`: what its scheduler may compute at once, where latency alone counts; None: its own default.
    """
    if contender.engine == "llama":
        return {"sequences": sequences, "length": length}
    if contender.engine == "openvino_pipeline" and batched_tokens is not None:
        return {"batched_tokens": batched_tokens}
    return {}
