"""The measurements: the requests to the engines, and the figures from their answers.

Prompts are random token ids, others in every round and the same for all engines: no cache of prefixes can help.
Processes stay open through a measurement; memory and first tokens are of processes of their own, one at a time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from baselines.quality import Quality, compare
from baselines.results import Series
from baselines.rounds import ROOM, Progress, Rounds, in_turn, settings
from baselines.scope import Scope
from baselines.tuning import combinations, uses
from baselines.worker import Contender, Worker
from llmc.errors import LlmcError

FROM_START = "process start to first token"
UNCOUNTED = 7
"""Tokens at the start of a text after which an engine's quality does not count, as in `llmc verify`."""


class Measurer(Rounds):
    """Runs the measurements of a scope over contenders.

    Each is in `series` from its first question on, so that an interrupt loses nothing that was answered.
    """

    def __init__(
        self, contenders: Sequence[Contender], scope: Scope, threads: int, vocabulary: int, logs: Path,
        progress: Progress,
    ) -> None:  # fmt: skip
        total = questions(scope) * len(contenders) + len(uses(scope)) * sum(len(combinations(c)) for c in contenders)
        super().__init__(contenders, threads, vocabulary, logs, total, progress)
        self.scope = scope
        self.series: list[Series] = []

    def _begin(self, *series: Series) -> None:
        self.series += series

    def unfinished(self, quality: Collection[str]) -> list[str]:
        """What of the scope has no figures yet, or not of every round, in words; `quality`: who has one."""
        names = [contender.name for contender in self.contenders]
        begun = {series.name: series for series in self.series}
        found = []
        if "quality" in self.scope.kinds and (left := [name for name in names if name not in quality]):
            found.append(f"quality of {', '.join(left)}")
        for title, rounds in titles(self.scope).items():
            series = begun.get(title)
            if series is None:
                found.append(title)
                continue
            have = {name: len(series.rounds.get(name, ())) for name in names if name not in series.missing}
            if short := [f"{name} {count} of {rounds}" for name, count in have.items() if count < rounds]:
                found.append(f"{title} in every round ({', '.join(short)})")
        return found

    def quality(
        self, reference: Contender, texts: Sequence[Sequence[int]], found: dict[str, Quality], notes: list[str]
    ) -> None:
        """Each contender's quality against the reference's logits, into `found`; why one has none, into `notes`."""
        with tempfile.TemporaryDirectory(dir=self.logs) as folder:
            wanted = Path(folder) / "reference.npy"
            self._logits(reference, texts, wanted)
            for contender in self.contenders:
                file = Path(folder) / "logits.npy"
                try:
                    self._logits(contender, texts, file)
                    found[contender.name] = compare(wanted, file, [len(t) for t in texts], UNCOUNTED)
                except LlmcError as error:
                    notes.append(f"quality of {contender.name} was not measured: {error}")
                file.unlink(missing_ok=True)
                self.on_progress(f"quality: {contender.name}")

    def _logits(self, contender: Contender, texts: Sequence[Sequence[int]], file: Path) -> None:
        sizes = settings(contender, sequences=1, length=max(map(len, texts)) + ROOM)
        with Worker(contender, self.threads, self.log(contender), **sizes) as worker:
            worker.ask("logits", texts=texts, file=str(file))

    def steps(self) -> None:
        """Decode steps at each batch size, and prompts of each length; milliseconds."""
        scope = self.scope
        longest = max([scope.decode_prompt + scope.steps, *scope.prompts])
        sizes = {"sequences": max(scope.batches), "length": longest + ROOM, "batched_tokens": longest}
        with self.open("latency", **sizes) as opened:
            for batch in scope.batches if "decode" in scope.kinds else ():
                self._begin(series := Series(_decode(batch), "ms"))
                outside: dict[str, list[float]] = {}

                def decode(worker: Worker, turn: int, batch: int = batch, outside: Any = outside) -> list[float]:
                    self.check(worker, batch, scope.decode_prompt, scope.steps + 1)
                    prompts = [self.ids(f"decode {batch} {turn} {row}", scope.decode_prompt) for row in range(batch)]
                    answer = worker.ask("decode", prompts=prompts, steps=scope.steps)
                    if turn and answer.get("execute"):
                        part = 1 - median(answer["execute"]) / median(answer["steps"])
                        outside.setdefault(worker.name, []).append(part)
                    return [median(answer["steps"]) * 1e3]

                self.ask(opened, [series], scope.rounds, decode)
                for name, values in outside.items():
                    series.share(name, "outside the graphs", values)
            for length in scope.prompts if "prefill" in scope.kinds else ():
                self._begin(series := Series(_prefill(length), "ms"))

                def prefill(worker: Worker, turn: int, length: int = length) -> list[float]:
                    self.check(worker, 1, length, 1)
                    prompt = self.ids(f"prefill {length} {turn}", length)
                    return [worker.ask("prefill", prompt=prompt)["seconds"] * 1e3]

                self.ask(opened, [series], scope.rounds, prefill)

    def first_tokens(self) -> None:
        """From starting a process to its first token's text; milliseconds. The files are in the page cache."""
        series, failed = Series(FROM_START, "ms"), dict[str, str]()
        self._begin(series)
        for turn in range(self.scope.first_token_rounds + 1):
            order = in_turn(self.contenders, turn)
            if turn:
                series.orders.append([contender.name for contender in order if contender.name not in failed])
            for contender in order:
                if contender.name not in failed:
                    try:
                        sizes = settings(contender, sequences=1, length=512)
                        with Worker(contender, self.threads, self.log(contender), **sizes) as worker:
                            took = worker.first_token(self.scope.question)
                    except LlmcError as error:
                        failed[contender.name] = str(error)
                    else:
                        if turn:
                            series.add(contender.name, took * 1e3)
                self.on_progress(f"{series.name}: {contender.name}")
        for name, why in failed.items():
            series.drop(name, why)

    def memory(self) -> None:
        """The most memory (PSS) of a process that answers several prompts at once; MB. One process at a time."""
        scope = self.scope
        rows, prompt, tokens = scope.memory_streams, scope.memory_prompt, scope.stream_tokens
        self._begin(series := Series(_memory(scope), "MB"))
        for contender in self.contenders:
            sizes = settings(contender, sequences=rows, length=prompt + tokens + ROOM)
            prompts = [self.ids(f"memory {row}", prompt) for row in range(rows)]
            try:
                with Worker(contender, self.threads, self.log(contender), **sizes) as worker:
                    self.warm(worker)
                    self.check(worker, rows, prompt, tokens)
                    _, most = worker.ask_with_memory("streams", prompts=prompts, tokens=tokens)
                series.add(contender.name, most / 1e6)
            except LlmcError as error:
                series.drop(contender.name, str(error))
            self.on_progress(f"{series.name}: {contender.name}")

    def streams(self) -> None:
        """Answers of several prompts at once, prefill and all; generated tokens a second."""
        scope = self.scope
        length = scope.stream_prompt + scope.stream_tokens
        with self.open("throughput", sequences=max(scope.streams), length=length + ROOM) as opened:
            for rows in scope.streams:
                self._begin(series := Series(_streams(scope, rows), "tokens/s", "more"))
                parts: dict[str, dict[str, list[float]]] = {}

                def stream(worker: Worker, turn: int, rows: int = rows, parts: Any = parts) -> list[float]:
                    self.check(worker, rows, scope.stream_prompt, scope.stream_tokens)
                    prompts = [self.ids(f"streams {rows} {turn} {row}", scope.stream_prompt) for row in range(rows)]
                    ours = {"replay": True} if worker.contender.kind == "llmc" else {}
                    answer = worker.ask("streams", prompts=prompts, tokens=scope.stream_tokens, **ours)
                    if turn and ours:
                        mine, took = parts.setdefault(worker.name, {}), answer["seconds"]
                        mine.setdefault("outside the graphs", []).append(1 - answer["execute_s"] / took)
                        mine.setdefault("of the same steps replayed bare", []).append(answer["bare_s"] / took)
                    return [answer["tokens"] / answer["seconds"]]

                self.ask(opened, [series], scope.rounds, stream)
                for name, shares in parts.items():
                    for what, values in shares.items():
                        series.share(name, what, values)

    def trace(self) -> None:
        """Requests of recorded lengths in a closed loop, continuously batched: throughput, and gaps between tokens."""
        scope = self.scope
        of_rate, *of_times = _trace(scope)
        rate = Series(of_rate, "generated tokens/s", "more")
        gap, middle, first = (Series(title, "ms") for title in of_times)
        self._begin(rate, gap, middle, first)
        asks = scope.recorded()
        with self.open("throughput", sequences=scope.concurrency, length=scope.max_len) as opened:

            def serve(worker: Worker, turn: int) -> list[float]:
                self.check(worker, scope.concurrency, 1, scope.max_len - 1)
                part = _part(asks, turn, scope)
                prompts = [self.ids(f"trace {turn} {at}", prompt) for at, (prompt, _) in enumerate(part)]
                tokens = [output for _, output in part]
                answer = worker.ask("serve", prompts=prompts, tokens=tokens, concurrency=scope.concurrency)
                return _served(answer)

            self.ask(opened, [rate, gap, middle, first], scope.trace_rounds, serve)


def titles(scope: Scope) -> dict[str, int]:
    """The name of every series that the scope asks for, in their order, and the rounds that count."""
    every = {
        "decode": ([_decode(batch) for batch in scope.batches], scope.rounds),
        "prefill": ([_prefill(length) for length in scope.prompts], scope.rounds),
        "first-token": ([FROM_START], scope.first_token_rounds),
        "memory": ([_memory(scope)], 1),
        "streams": ([_streams(scope, rows) for rows in scope.streams], scope.rounds),
        "trace": (_trace(scope), scope.trace_rounds),
    }  # fmt: skip
    return {name: rounds for kind, (names, rounds) in every.items() if kind in scope.kinds for name in names}


def _decode(batch: int) -> str:
    return f"decode step, batch {batch}"


def _prefill(length: int) -> str:
    return f"prefill of {length:,} tokens"


def _memory(scope: Scope) -> str:
    return f"memory (PSS), {scope.memory_streams} streams of {scope.memory_prompt} + {scope.stream_tokens} tokens"


def _streams(scope: Scope, rows: int) -> str:
    word = "stream" if rows == 1 else "streams"
    return f"{rows} {word} of {scope.stream_prompt} + {scope.stream_tokens} tokens"


def _trace(scope: Scope) -> list[str]:
    what = ("throughput", "p95 between tokens", "p50 between tokens", "p95 to the first token")
    return [f"recorded lengths, {scope.concurrency} at a time: {one}" for one in what]


def questions(scope: Scope) -> int:
    """How often each contender is asked."""
    warm = scope.rounds + 1
    counts = {
        "quality": 1, "decode": len(scope.batches) * warm, "prefill": len(scope.prompts) * warm,
        "first-token": scope.first_token_rounds + 1, "memory": 1, "streams": len(scope.streams) * warm,
        "trace": scope.trace_rounds + 1,
    }  # fmt: skip
    return sum(count for kind, count in counts.items() if kind in scope.kinds)


def _part(asks: Sequence[tuple[int, int]], turn: int, scope: Scope) -> Sequence[tuple[int, int]]:
    """The requests of a round; the first, which warms, has the last few again."""
    if turn == 0:
        return asks[-scope.concurrency :]
    return asks[(turn - 1) * scope.requests : turn * scope.requests]


def _served(answer: dict[str, Any]) -> list[float]:
    """Tokens a second; milliseconds between tokens (95th and 50th percentile) and to the first one (95th)."""
    times = answer["times"]
    gaps = [b - a for row in times for a, b in pairwise(row)]
    firsts = [row[0] - sent for row, sent in zip(times, answer["sent"], strict=True)]
    p95, p50 = np.percentile(gaps, [95, 50]).tolist()
    return [sum(map(len, times)) / answer["seconds"], p95 * 1e3, p50 * 1e3, float(np.percentile(firsts, 95)) * 1e3]
