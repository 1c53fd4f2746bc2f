"""Prove an assembled bundle: right numbers in every sampled bucket, and padding that cannot leak.

Each bucket is run twice over ragged rows whose unused cache is poisoned, first with NaN and one set of random pad
tokens, then with large numbers and another set. Both runs must agree, and agree with the reference. Then the probes
are generated greedily in ragged batches through the engine that serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.bucket import Bucket
from llmc.buckets.plan import Plan
from llmc.compiler.verification.limits import Limits
from llmc.compiler.verification.probes import Probe
from llmc.errors import VerificationError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine import Engine, Request
from llmc.runtime.executors.base import Executor
from llmc.runtime.sampling import SamplingParams
from llmc.runtime.step import Step, exact, pad

SAMPLES = 4
_NAN, _LARGE = float("nan"), 1e4
_TIE = 2e-3
"""Logit margin of the reference's best two below which either is right: float32 sums differ in their last digits."""


@dataclass(frozen=True)
class Result:
    """Outcome over all rows that were compared; `leak` is the largest logit change that poison and pads caused."""

    buckets: int
    rows: int
    mean_kl: float
    max_kl: float
    top1: float
    max_abs: float
    leak: float
    greedy_sequences: int
    greedy_equal: int

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        return asdict(self)


class _Row(NamedTuple):
    probe: int
    position: int
    past: int


def sample_buckets(plan: Plan, every: bool) -> list[Bucket]:
    """All buckets, or the smallest, the largest and some between of each phase."""
    if every:
        return list(plan.buckets)
    chosen = []
    for phase in (plan.prompt, plan.decode):
        order = sorted(phase, key=lambda b: (b.tokens * (1 + b.context), b))
        picks = sorted({round(i) for i in np.linspace(0, len(order) - 1, SAMPLES)})
        chosen += [order[i] for i in picks]
    return chosen


def verify_bundle(
    bundle: Bundle, probes: Sequence[Probe], buckets: Sequence[Bucket], limits: Limits, threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Result:  # fmt: skip
    """Run the checks; raises VerificationError naming the bucket or prompt that fails, with its numbers."""
    executor = bundle.executor(threads=threads)
    try:
        return _Verification(bundle, executor, probes, limits).run(buckets, progress)
    finally:
        executor.close()


class _Verification:
    def __init__(self, bundle: Bundle, executor: Executor, probes: Sequence[Probe], limits: Limits) -> None:
        self.plan = bundle.plan
        self.executor = executor
        self.probes = probes
        self.limits = limits
        self.vocab_size = int(bundle.manifest.model["vocab_size"])
        self.engine = Engine(self.plan, executor, self.vocab_size)
        self.random = np.random.default_rng(0)
        self.kl: list[float] = []
        self.equal: list[bool] = []
        self.max_abs = 0.0
        self.leak = 0.0

    def run(self, buckets: Sequence[Bucket], progress: Callable[[int, int], None] | None) -> Result:
        self._poison(_NAN)
        total = len(buckets) + 1
        equal = self._greedy()
        if progress:
            progress(1, total)
        prefix = self._long_prefix(max((b.context for b in buckets), default=0))
        for done, bucket in enumerate(buckets, 2):
            self._bucket(bucket, prefix)
            if progress:
                progress(done, total)
        mean_kl, top1 = float(np.mean(self.kl)), float(np.mean(self.equal))
        result = Result(
            len(buckets), len(self.kl), mean_kl, float(np.max(self.kl)), top1, self.max_abs, self.leak,
            len(self.probes) - 1, equal,
        )  # fmt: skip
        if mean_kl > self.limits.mean_kl or top1 < self.limits.top1:
            raise VerificationError(
                f"compiled graphs disagree with the reference model: mean KL {mean_kl:.2g} (limit "
                f"{self.limits.mean_kl:.2g}), equal tokens {top1:.1%} (limit {self.limits.top1:.0%}) over "
                f"{len(self.kl)} rows of {len(buckets)} buckets"
            )
        return result

    def _greedy(self) -> int:
        """Generate all probes in ragged batches; returns how many equal the reference's greedy tokens."""
        short = [p for p in self.probes[:-1] if p.continuation]
        requests = [
            Request(p.tokens[: p.prompt_length].tolist(), SamplingParams(
                max_tokens=len(p.continuation), temperature=0, ignore_eos=True))
            for p in short if p.prompt_length <= self.plan.limits.longest_prompt
        ]  # fmt: skip
        made: dict[int, list[int]] = {}
        for event in self.engine.generate(requests):
            made.setdefault(event.index, []).append(event.token_id)
        equal = 0
        for i, probe in enumerate(short[: len(requests)]):
            at = next((k for k, (a, b) in enumerate(zip(made[i], probe.continuation, strict=False)) if a != b), None)
            if at is None or self._tied(probe, at, made[i][at]):
                equal += 1
            elif self.limits.greedy_equal:
                raise VerificationError(
                    f"greedy token {at + 1} of probe prompt {i + 1} is {made[i][at]}, the reference model's is "
                    f"{probe.continuation[at]}; the compiled graphs are wrong for this model"
                )
        return equal

    @staticmethod
    def _tied(probe: Probe, at: int, token: int) -> bool:
        row = probe.logits[at]
        return bool(row.max() - row[token] < _TIE)

    def _long_prefix(self, context: int) -> list[NDArray[np.float32]]:
        """The long sequence's cache, as the bundle's own prompt graphs compute it."""
        long = self.probes[-1]
        length = min(len(long.tokens), self.plan.limits.longest_prompt, max(context, 1))
        request = Request(long.tokens[:length].tolist(), SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
        list(self.engine.generate([request]))
        return self.executor.export_prefix(0, length)

    def _bucket(self, bucket: Bucket, prefix: list[NDArray[np.float32]]) -> None:
        rows = list(self._rows(bucket, prefix[0].shape[1]))
        if not rows:
            return
        for step in self._steps(bucket, rows):
            live = [rows[slot] for slot in step.slots]
            first = self._replay(step, live, prefix, _NAN)
            second = self._replay(step, live, prefix, _LARGE)
            change = float(np.abs(first - second).max())
            if not np.isfinite(first).all() or not change <= _TIE:
                raise VerificationError(
                    f"padding leaks into results in {bucket}: logits change by {change:.3g} with the pad tokens and "
                    "the unused cache"
                )
            self.leak = max(self.leak, change)
            for got, row in zip(first, live, strict=True):
                self._compare(got, row)

    def _rows(self, bucket: Bucket, prefix: int) -> Iterator[_Row]:
        """Ragged rows for a bucket: the first as long as fits, the others spread below."""
        long = len(self.probes) - 1
        if bucket.context == 0:
            fits = [
                _Row(i, int(p), 0)
                for i, probe in enumerate(self.probes) for p in probe.positions if p < bucket.query
            ]  # fmt: skip
            fits.sort(key=lambda r: r.position)
        else:
            fits = []
            for p in self.probes[long].positions.tolist():
                new = min(bucket.query, max(1, p + 1 - bucket.context // 2), p + 1)
                past = p + 1 - new
                if past <= min(bucket.context, prefix):
                    fits.append(_Row(long, p, past))
            fits.sort(key=lambda r: r.past)
        if fits:
            for i in np.linspace(len(fits) - 1, 0, bucket.batch):
                yield fits[round(i)]

    def _tokens(self, row: _Row) -> list[int]:
        tokens: list[int] = self.probes[row.probe].tokens[row.past : row.position + 1].tolist()
        return tokens

    def _steps(self, bucket: Bucket, rows: list[_Row]) -> Iterator[Step]:
        tokens, past = [self._tokens(r) for r in rows], [r.past for r in rows]
        if not self.executor.exact:
            yield pad(bucket, range(len(rows)), tokens, past)
        elif bucket.phase == "decode":
            yield exact("decode", range(len(rows)), tokens, past)
        else:
            for i in range(len(rows)):
                yield exact("prompt", [i], [tokens[i]], [past[i]])

    def _replay(
        self, step: Step, live: list[_Row], prefix: list[NDArray[np.float32]], poison: float
    ) -> NDArray[np.float32]:
        self._poison(poison)
        for slot, row in zip(step.slots, live, strict=True):
            if row.past:
                self.executor.import_prefix(slot, [t[:, : row.past] for t in prefix])
        for slot, row in zip(step.slots, live, strict=True):
            self.executor.poison(slot, row.past, poison)
        live_tokens = np.arange(step.query)[None] < step.new_lengths[:, None]
        live_tokens[len(live) :] = False
        pads = self.random.integers(0, self.vocab_size, step.token_ids.shape)
        step.token_ids[:] = np.where(live_tokens, step.token_ids, pads)
        return self.executor.run(step)[: len(live)].copy()

    def _poison(self, value: float) -> None:
        for slot in range(self.executor.slots):
            self.executor.poison(slot, 0, value)

    def _compare(self, got: NDArray[np.float32], row: _Row) -> None:
        probe = self.probes[row.probe]
        wanted = probe.logits[int(np.searchsorted(probe.positions, row.position))]
        self.kl.append(kl_divergence(wanted, got))
        best = int(got.argmax())
        self.equal.append(best == int(wanted.argmax()) or bool(wanted.max() - wanted[best] < _TIE))
        self.max_abs = max(self.max_abs, float(np.abs(got - wanted).max()))


def kl_divergence(reference: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """KL(reference ‖ other) in nats, of the softmax of two logit rows [V]."""
    p, q = _log_softmax(reference), _log_softmax(other)
    return max(0.0, float((np.exp(p) * (p - q)).sum()))


def _log_softmax(row: NDArray[np.float32]) -> NDArray[np.float64]:
    x = row.astype(np.float64)
    x -= x.max()
    x -= np.log(np.exp(x).sum())
    return x
