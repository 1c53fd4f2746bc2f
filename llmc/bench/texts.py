"""Measure the texts per second of a bundle that embeds or scores.

Each round passes all texts of a file once, including tokenization, as a caller would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from llmc.runtime.pooling.pooler import Pooler, Statistics
from llmc.runtime.startup.pool_warming import PoolWarming

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle

Progress = Callable[[str, int, int], None]
"""Called with a text about a round or a warm-up bucket, and how many of how many are done."""

UNMEASURED = "unmeasured"


@dataclass(frozen=True)
class TextRound:
    """One pass over all texts, or the part before an interrupt. `padded` counts computed tokens with padding."""

    seconds: float
    texts: int
    tokens: int
    padded: int
    batches: int

    @property
    def rate(self) -> float:
        """Texts per second."""
        return self.texts / self.seconds

    @property
    def padding(self) -> float:
        """The share of the computed tokens that are padding."""
        return 1 - self.tokens / self.padded


@dataclass(frozen=True)
class TextBench:
    """Results: `rounds` of `requested`. `partial`: an interrupt cut the only round.

    `buckets` counts a round's batches by (batch, tokens), if executables have fixed shapes.
    """

    bundle: str
    device: str
    task: str
    threads: int
    requested: int
    rounds: tuple[TextRound, ...]
    partial: bool
    buckets: Mapping[tuple[int, int], int]
    compilations: int

    @property
    def rate(self) -> float:
        """Texts per second, median of the rounds."""
        return median(one.rate for one in self.rounds)

    @property
    def best(self) -> float:
        """Texts per second of the best round."""
        return max(one.rate for one in self.rounds)

    @property
    def unmeasured(self) -> list[str]:
        """Descriptions of what an interrupt left out; empty if nothing is missing."""
        left = self.requested - len(self.rounds) + self.partial
        return [f"{left} of {self.requested} rounds"] if left else []

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON members; rates are texts and tokens per second."""
        last = self.rounds[-1]
        return {
            "bundle": self.bundle, "device": self.device, "task": self.task, "threads": self.threads,
            "texts": last.texts, "tokens": last.tokens, "padded_tokens": last.padded, "batches": last.batches,
            "padding": last.padding, "texts_per_s": self.rate, "best_texts_per_s": self.best,
            "tokens_per_s": self.rate * last.tokens / last.texts,
            "rounds": [{"seconds": one.seconds, "texts": one.texts} for one in self.rounds],
            "buckets": [[*shape, steps] for shape, steps in sorted(self.buckets.items())],
            "compilations": self.compilations, "partial": self.partial,
            **({UNMEASURED: self.unmeasured} if self.unmeasured else {}),
        }  # fmt: skip


def measure(
    bundle: Bundle, texts: Sequence[str], *, query: str = "", rounds: int = 5, cut: int | None = None,
    threads: int | None = None, report: Progress = lambda *_: None,
) -> TextBench:  # fmt: skip
    """Pass all `texts` through the bundle `rounds` times, after every bucket has run once.

    A bundle that scores gets each text as a document for `query`. `cut` is as in `Pooler.embed`. An interrupt
    (KeyboardInterrupt) ends it early: complete rounds are kept, and the first round even if partial. If nothing was
    measured, it is raised again. Raises InputError for texts that are too long, ArtifactError or DeviceError if this
    host cannot run the bundle.
    """
    pooler = Pooler(bundle, threads)
    found: list[TextRound] = []
    buckets: Mapping[tuple[int, int], int] = {}
    partial, began = False, 0.0
    try:
        warming = PoolWarming(pooler)
        steps = len(warming.buckets) + rounds
        for done, warmed in enumerate(warming.run(), 1):
            if warmed.error is not None:
                raise warmed.error
            report(f"warm up: {warmed.seconds:.3f} s", done, steps)
        pooler.encoder.compilations.ready()
        for done in range(rounds):
            pooler.statistics = Statistics()
            began = time.perf_counter()
            if pooler.task == "score":
                pooler.score([(query, text) for text in texts], cut=cut)
            else:
                pooler.embed(list(texts), cut=cut)
            found.append(_round(pooler, time.perf_counter() - began))
            buckets = dict(pooler.statistics.buckets)
            report(f"round: {found[-1].rate:,.1f} texts/s", steps - rounds + done + 1, steps)
    except KeyboardInterrupt:
        seconds = time.perf_counter() - began
        if not found and (not began or not pooler.statistics.rows):
            raise
        if not found:
            partial, buckets = True, dict(pooler.statistics.buckets)
            found.append(_round(pooler, seconds))
    finally:
        pooler.close()
    return TextBench(
        str(bundle.path), bundle.manifest.device, pooler.task, pooler.encoder.threads, rounds, tuple(found), partial,
        buckets, pooler.encoder.compilations.count,
    )  # fmt: skip


def _round(pooler: Pooler, seconds: float) -> TextRound:
    counted = pooler.statistics
    return TextRound(seconds, counted.rows, counted.tokens, counted.padded_tokens, counted.steps)
