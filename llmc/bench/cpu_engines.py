"""Compare the engines that `--device cpu` chooses from on this host (`llmc bench cpu`).

Each engine runs its own bundle in its own process. Every round measures every engine and starts with a different one,
so that a host that slows down affects all. The first round warms up and does not count. Prompts are random token ids,
new in each round. Memory and first-token times are measured in fresh processes, one at a time.
"""

from __future__ import annotations

import platform
import random
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from llmc.bench.worker import Worker, command
from llmc.compiler.model_size import weights_of
from llmc.compiler.options import CompileOptions
from llmc.compiler.targets.cpu import OPTIONS, PLAIN, configured, versions
from llmc.runtime.accelerators import cpu_name
from llmc.runtime.bundle import Bundle
from llmc.runtime.host import cpu_features

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.settings import Settings

Progress = Callable[[str, int, int], None]
"""Called with a text, and how many of how many measurements are done."""

ENGINE = Path(__file__).with_name("bundle_engine.py")
SEQUENCES, LENGTH = 16, 1024
"""Limits of the measured bundles: the largest batch, and room for the prompts."""
BATCHES, DECODE_PROMPT = (1, 4, 8, 16), 64
PREFILL = 512
STREAMS, STREAM_PROMPT = 8, 256
QUESTION = "What is gravity?"

START = "process start to first token, s"
PROMPT = f"prefill of {PREFILL} tokens, ms"
MEMORY = f"memory (PSS) of {STREAMS} streams, bytes"


@dataclass(frozen=True)
class Amount:
    """How much to measure: counted rounds, decode steps per round, first-token runs, and answer tokens for memory."""

    rounds: int = 5
    steps: int = 32
    first_tokens: int = 10
    answer: int = 64

    @classmethod
    def of(cls, quick: bool, rounds: int | None) -> Amount:
        """The amount for `--quick` and `--rounds`."""
        some = cls(2, 12, 3, 32) if quick else cls()
        return some if rounds is None else replace(some, rounds=rounds)

    def wanted(self) -> dict[str, int]:
        """Every measurement's name in measuring order, and its number of rounds."""
        return {**dict.fromkeys(map(decode, BATCHES), self.rounds), PROMPT: self.rounds,
                START: self.first_tokens, MEMORY: 1}  # fmt: skip


@dataclass
class Figures:
    """Results. `rounds`: measurement → bundle → one value per round; `unfinished` names what an interrupt left out."""

    threads: int
    rounds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    unfinished: list[str] = field(default_factory=list)

    def median(self, measurement: str, name: str) -> float | None:
        """Median over the rounds; None if the bundle has none."""
        values = self.rounds.get(measurement, {}).get(name)
        return median(values) if values else None

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON members."""
        return {"threads": self.threads, "rounds": self.rounds, "unfinished": self.unfinished}


def decode(batch: int) -> str:
    """Name of the decode measurement for a batch size."""
    return f"decode step, batch {batch}, ms"


def cases(checkpoint: Checkpoint, engines: tuple[str, ...]) -> list[tuple[str, str]]:
    """Engine and weight format of each bundle to measure: PLAIN, which all engines offer, then the engine's default."""
    found = []
    for engine in engines:
        own = str(configured(engine, CompileOptions(engine), weights_of(checkpoint))["quantize"])
        found += [(engine, kind) for kind in dict.fromkeys((PLAIN, own))]
    return found


def compiled(checkpoint: Checkpoint, engine: str, kind: str, folder: Path, settings: Settings) -> Bundle:
    """The bundle of an engine and weight format in `folder`, compiled now or taken from the store."""
    from llmc.artifacts.local.opening import open_store
    from llmc.compiler.pipeline.compile import compile_bundle
    from llmc.compiler.pipeline.planning import plan_for

    plan = plan_for(checkpoint, max_model_len=LENGTH, max_num_seqs=SEQUENCES)
    options = CompileOptions(engine, kind, verify="none", jobs=settings.threads)
    compile_bundle(checkpoint, folder, plan, options, open_store(None, settings, engine), lambda _: None)
    return Bundle.open(folder)


def measure(bundles: Mapping[str, Bundle], amount: Amount, threads: int, logs: Path, report: Progress) -> Figures:
    """Measure every bundle. The engines' output goes to files in `logs`.

    An interrupt (KeyboardInterrupt) ends it early: the result names what is missing in `unfinished`. If nothing was
    measured, it is raised again. Raises EngineError for an engine that fails.
    """
    logs.mkdir(parents=True, exist_ok=True)
    found = Figures(threads)
    try:
        _Turns(bundles, amount, logs, report, found).all()
    except KeyboardInterrupt:
        if not any(found.rounds.values()):
            raise
        for title, rounds in amount.wanted().items():
            counts = {name: len(found.rounds.get(title, {}).get(name, ())) for name in bundles}
            if short := [f"{name} {count} of {rounds}" for name, count in counts.items() if count < rounds]:
                begun = any(counts.values())
                found.unfinished.append(f"{title} in every round ({', '.join(short)})" if begun else title)
    return found


class _Turns:
    def __init__(
        self, bundles: Mapping[str, Bundle], amount: Amount, logs: Path, report: Progress, found: Figures
    ) -> None:
        self._bundles, self._amount, self._logs, self._found = bundles, amount, logs, found
        self._vocabulary = min(int(bundle.manifest.model["vocab_size"]) for bundle in bundles.values())
        self._report, self._done = report, 0
        self._total = sum(rounds + (title != MEMORY) for title, rounds in amount.wanted().items()) * len(bundles)

    def all(self) -> None:
        amount = self._amount
        with ExitStack() as opened:
            workers = {name: opened.enter_context(self._open(name)) for name in self._bundles}
            for worker in workers.values():
                worker.ask("warm")
            for batch in BATCHES:

                def steps(name: str, turn: int, batch: int = batch) -> float:
                    prompts = [self._ids(f"decode {batch} {turn} {row}", DECODE_PROMPT) for row in range(batch)]
                    answer = workers[name].ask("decode", prompts=prompts, steps=amount.steps)
                    return float(median(answer["steps"])) * 1e3

                self._rounds(decode(batch), steps)

            def prompt(name: str, turn: int) -> float:
                answer = workers[name].ask("prefill", prompt=self._ids(f"prefill {turn}", PREFILL))
                return float(answer["seconds"]) * 1e3

            self._rounds(PROMPT, prompt)
        self._rounds(START, self._first_token)
        self._rounds(MEMORY, self._memory, warm=False)

    def _first_token(self, name: str, _: int) -> float:
        with self._open(name) as worker:
            return worker.first_token(QUESTION)

    def _memory(self, name: str, _: int) -> float:
        prompts = [self._ids(f"memory {row}", STREAM_PROMPT) for row in range(STREAMS)]
        with self._open(name) as worker:
            worker.ask("warm")
            return float(worker.ask_with_memory("streams", prompts=prompts, tokens=self._amount.answer)[1])

    def _rounds(self, title: str, ask: Callable[[str, int], float], warm: bool = True) -> None:
        figures = self._found.rounds.setdefault(title, {})
        names = list(self._bundles)
        for turn in range(0 if warm else 1, self._amount.wanted()[title] + 1):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                figure = ask(name, turn)
                if turn:
                    figures.setdefault(name, []).append(figure)
                self._done += 1
                self._report(f"{title.rpartition(',')[0]}: {name}", self._done, self._total)

    def _open(self, name: str) -> Worker:
        options = {"model": str(self._bundles[name].path.absolute()), "threads": self._found.threads}
        log = self._logs / f"{name.replace(' ', '-')}.log"
        return Worker(name, command(sys.executable, ENGINE, options), log)

    def _ids(self, seed: str, length: int) -> list[int]:
        return random.Random(seed).choices(range(self._vocabulary), k=length)  # noqa: S311 - no secret


def record(found: Figures, checkpoint: Checkpoint, engines: tuple[str, ...]) -> dict[str, Any]:
    """Convert complete results to a record that `--device cpu` chooses by (cpu/measurements.py)."""
    built: dict[str, dict[str, Any]] = {engine: {} for engine in engines}
    for engine, kind in cases(checkpoint, engines):
        options = configured(engine, CompileOptions(engine, kind))
        one = {what: found.median(what, f"{engine} {kind}") or 0.0 for what in found.rounds}
        built[engine][kind] = {
            "options": {name: value for name, value in options.items() if name in OPTIONS},
            "decode_ms": {str(batch): round(one[decode(batch)], 3) for batch in BATCHES},
            "prefill_ms": {str(PREFILL): round(one[PROMPT], 2)},
            "start_s": round(one[START], 3),
            "memory_bytes": int(one[MEMORY]),
        }
    return {
        "machine": f"{cpu_name() or platform.machine()}, {found.threads} threads",
        "isa": list(cpu_features()),
        "threads": found.threads,
        "model": checkpoint.name,
        "model_type": str(checkpoint.config.get("model_type")),
        "parameters": sum(weights.count for weights in weights_of(checkpoint)),
        "versions": versions(engines),
        "engines": built,
    }
