"""Verify an assembled bundle: right numbers from every executable, and no influence of padding.

Each executable runs at a bucket that it serves and must agree with the reference. Its rows are ragged, with NaN in the
unused cache and random pad tokens. The past of every row is cut from the longest prompt's past. That prompt runs alone
in its step where steps are not padded; a bucket's own run of it then serves as well. With selectable adapters, each row
has another one and must agree with the model that this one is merged into; each bucket runs with all of them. Sampled
buckets run again, with large numbers in the unused cache and with other pad tokens; both runs must agree. The serving
engine generates the probes greedily in ragged batches, and accuracy.py reads a text, with no adapter.

Values beyond the range of the KV cache's precision must not be served. A graph may write them as infinities, as the
largest number of the precision, or as NaN; each counts.

`Agreement` verifies a finished bundle without a checkpoint. Its reference are the portable executables that its own
were built from, which were verified against the reference model. Both replay the same steps over the same past.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmc.buckets.bucket import Bucket
from llmc.compiler.verification import accuracy
from llmc.compiler.verification.accuracy import kl_divergence, tied
from llmc.compiler.verification.limits import AccuracyLimits
from llmc.compiler.verification.parts import past_length
from llmc.compiler.verification.probes import LONGEST, PROMPTS, Probe, TextWindow, around, positions_of
from llmc.compiler.verification.steps import decode_step, empty, fitting, prompt_chunk, prompt_steps
from llmc.compiler.verification.texts import long_text
from llmc.errors import ArtifactError, VerificationError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.batched_core import BatchedCore
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors.base import Executor
from llmc.runtime.step import Step, exact, pad, ragged
from llmc.runtime.top_logits import TopLogits, top_of

LARGEST = {"f16": 65504.0, "float16": 65504.0, "fp8": 448.0}
"""Largest number by cache precision, for those whose range keys and values can exceed."""


def beyond(tensors: Iterable[NDArray[np.float32]], dtype: str) -> int:
    """Count the values of a cache of that precision that are NaN, infinite, or the largest number that it has."""
    largest = LARGEST.get(dtype, np.inf)
    return sum(int(np.count_nonzero(~(np.abs(tensor) < largest))) for tensor in tensors)


def beyond_in(executor: Executor, slots: Iterable[tuple[int, int, int]]) -> int:
    """Count `beyond` for tokens from … end − 1 of slots given as (slot, from, end); recurrent state covers all earlier
    tokens."""
    dtype = str(executor.bundle.manifest.options.get("kv_cache_dtype") or executor.bundle.manifest.options.get("dtype"))
    count = 0
    for slot, start, end in slots:
        tensors = executor.export_prefix(slot, end)
        count += beyond(tensors if executor.bundle.cache_shape.states else (t[:, start:] for t in tensors), dtype)
    return count


def require_held(outcome: Mapping[str, Any]) -> None:
    """Raise VerificationError for the outcome of a bucket that left such values in the cache."""
    if outcome.get("beyond"):
        raise VerificationError(
            f"{outcome['beyond']} keys and values of {outcome['bucket']} are beyond the range of the KV cache's "
            "precision: compile with a wider one, with --kv-cache-dtype bf16, f32 or int8, --kernels onnxruntime, or "
            "--dtype f32, as the device has it"
        )


NAN, LARGE = float("nan"), 1e4
SHOWN = 5
"""Further buckets that an error names."""
LEAK_LIMIT = 1e-4
"""Largest change of a logit that the fill may cause; one executable gives equal sums for equal live input."""


@dataclass(frozen=True)
class Result:
    """Outcome over all compared rows; `leak` is the largest logit change from the fill of the unused cache and from
    pads.

    `executables` ran, at `buckets`, `twice` of them with two fills; `longest` is the most tokens that a row had, past
    and new. `accuracy` is accuracy.py's, over a text. `unreached` buckets take more tokens than were run.
    """

    executables: int
    buckets: int
    twice: int
    rows: int
    longest: int
    mean_kl: float
    max_kl: float
    top1: float
    max_abs: float
    leak: float
    greedy_sequences: int
    greedy_equal: int
    unreached: list[str]
    accuracy: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """The result for the manifest; without an accuracy where none was measured."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def summarise(outcomes: Sequence[Mapping[str, Any]], limits: AccuracyLimits) -> Result:
    """Join the outcomes of `Verification`'s parts; raises VerificationError, with numbers, beyond `limits`."""
    buckets = [o for o in outcomes if "bucket" in o]
    kl = [k for o in buckets for k in o["kl"]]
    equal = [e for o in buckets for e in o["equal"]]
    differing = [d for o in outcomes for d in o.get("differing", [])]
    result = Result(
        executables=len({name for o in buckets for name in o["executables"]}), buckets=len(buckets),
        twice=sum(o["runs"] > 1 for o in buckets), rows=len(kl),
        longest=max(o["longest"] for o in buckets), mean_kl=float(np.mean(kl)), max_kl=float(np.max(kl)),
        top1=float(np.mean(equal)), max_abs=max(o["max_abs"] for o in buckets), leak=max(o["leak"] for o in buckets),
        greedy_sequences=sum(o.get("sequences", 0) for o in outcomes),
        greedy_equal=sum(o.get("sequences", 0) for o in outcomes) - len(differing),
        accuracy=next((o["accuracy"] for o in outcomes if "accuracy" in o), None),
        unreached=[o["bucket"] for o in buckets if o.get("unreached")],
    )  # fmt: skip
    for o in buckets:
        require_held(o)
        if not o["leak"] <= LEAK_LIMIT:
            raise VerificationError(
                f"padding leaks into results in {o['bucket']}: logits change by {o['leak']:.3g} with the pad tokens "
                "and the unused cache"
            )
        if o.get("top_differs"):
            raise VerificationError(
                f"the largest logits that {o['bucket']} returns are not the largest of all its logits in "
                f"{o['top_differs']} rows"
            )
    _require_buckets([o for o in buckets if o["kl"]], limits)
    worst = max((o for o in buckets if o["kl"]), key=lambda o: float(np.mean(o["kl"])))
    top1 = accuracy.least_equal(limits.top1, result.rows)
    if not (result.mean_kl <= limits.mean_kl and result.top1 >= top1):
        raise VerificationError(
            f"compiled graphs disagree with the reference model: mean KL {result.mean_kl:.2g} (limit "
            f"{limits.mean_kl:.2g}), top-1 agreement {result.top1:.1%} (limit {top1:.0%}) over {result.rows} rows "
            f"of {result.buckets} buckets; the worst is {worst['bucket']}"
        )
    if differing and limits.greedy_equal:
        raise VerificationError(f"{differing[0]}; the compiled graphs are wrong for this model")
    if result.accuracy is not None:
        accuracy.check(result.accuracy, limits)
    return result


def _require_buckets(buckets: Sequence[Mapping[str, Any]], limits: AccuracyLimits) -> None:
    """Raise VerificationError, naming the buckets that are beyond `limits` by themselves.

    Buckets that others continue from come first, because a wrong past from them also fails correct graphs.
    """
    wrong = [
        o for o in buckets
        if not (np.mean(o["kl"]) <= limits.bucket_limit(len(o["kl"])) and np.max(o["kl"]) <= limits.row_kl)
    ]  # fmt: skip
    if wrong:
        first, *others = wrong
        more = f"; also in {', '.join(o['bucket'] for o in others[:SHOWN])}" if others else ""
        more += f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        raise VerificationError(
            f"compiled graphs disagree with the reference model in {first['bucket']}: mean KL "
            f"{np.mean(first['kl']):.2g} (limit {limits.bucket_limit(len(first['kl'])):.2g}) over its "
            f"{len(first['kl'])} rows, the worst {np.max(first['kl']):.2g} (limit {limits.row_kl:.2g}){more}"
        )


Prefixes: TypeAlias = "Mapping[int, list[NDArray[np.float32]]]"
"""The cache of the long sequence's beginning by adapter, as `Executor.export_prefix` returns it."""


class ReplayedRow(NamedTuple):
    """A row of a step: the beginning of a probe, its last token at `position`, after `past` cached ones."""

    probe: int
    position: int
    past: int


class Verification:
    """The checks of one opened bundle; each part returns its outcome as JSON values.

    At most `beyond` decode steps lengthen a past beyond the longest prompt. `turns` are the positions where the model's
    behaviour changes (`turns_of`).
    """

    def __init__(
        self, bundle: Bundle, executor: Executor, probes: Sequence[Probe], windows: Sequence[TextWindow], beyond: int,
        turns: Sequence[int],
    ) -> None:  # fmt: skip
        self.plan = bundle.plan
        self.portable = all(e.state == "portable" for e in bundle.manifest.executables)
        self.executor = executor
        self.probes = probes
        self.windows = windows
        self.beyond = beyond
        self.turning = around(turns)
        self.vocab_size = bundle.size("vocab_size")
        self.engine = BatchedCore(self.plan, executor, self.vocab_size, min_prefix=0, on_compilation="ignore")
        self.random = np.random.default_rng(0)
        self._long = {probe.adapter: i for i, probe in enumerate(probes)}
        """The probe of the long sequence with each adapter, and with none."""
        self._prefixes: dict[tuple[int, int], list[NDArray[np.float32]]] = {}
        self._prefixes_beyond: dict[tuple[int, int], int] = {}
        self._top: TopLogits
        self._nan_fill(NAN)

    def greedy(self) -> dict[str, Any]:
        """Generate all probes greedily in ragged batches, and report differences from the reference."""
        empty(self.executor)
        short = [p for p in self.probes if p.continuation and p.prompt_length <= self.plan.limits.longest_prompt]
        built = self.engine.complete(
            [p.tokens[: p.prompt_length].tolist() for p in short],
            [SamplingParams(max_tokens=len(p.continuation), temperature=0, ignore_eos=True) for p in short],
            [p.adapter for p in short],
        )
        differing = []
        for i, probe in enumerate(short):
            pairs = enumerate(zip(built[i], probe.continuation, strict=False))
            at = next((k for k, (got, wanted) in pairs if got != wanted), None)
            if at is None and len(built[i]) != len(probe.continuation):
                differing.append(
                    f"probe prompt {i + 1} ended after {len(built[i])} of {len(probe.continuation)} greedy tokens"
                )
            if at is not None and not tied(probe.logits[at], built[i][at]):
                differing.append(
                    f"greedy token {at + 1} of probe prompt {i + 1} is {built[i][at]}, the reference model's is "
                    f"{probe.continuation[at]}"
                )
        return {"sequences": len(short), "differing": differing}

    def accuracy(self) -> dict[str, Any]:
        """Divergence from the reference over the text, with NaN in every slot before."""
        empty(self.executor)
        self._nan_fill(NAN)
        last = accuracy.PORTABLE if self.portable else None
        return {"accuracy": accuracy.measure(self.plan, self.executor, self.windows, last)}

    def bucket(self, bucket: Bucket, runs: int = 2) -> dict[str, Any]:
        """Compare ragged rows of one bucket with the reference; a second run uses another fill of the unused cache.

        The outcome does not depend on earlier parts.
        """
        self.random = np.random.default_rng(0)
        outcome: dict[str, Any] = {
            "bucket": str(bucket), "runs": runs, "kl": [], "equal": [], "max_abs": 0.0, "leak": 0.0, "longest": 0,
            "executables": [], "beyond": 0, "unreached": self._unreached(bucket),
        }  # fmt: skip
        length = self._past_length(bucket)
        prefixes = {adapter: self._prefix(length, adapter) for adapter in self._long} if length else {}
        outcome["beyond"] = sum(self._prefixes_beyond[length, adapter] for adapter in prefixes)
        for first in range(0, len(self._long), bucket.batch):
            rows = list(self._rows(bucket, length, first))
            rows = [row for row in rows if fitting(self.executor, [row.position + 1])]
            rows = rows[: fitting(self.executor, [row.position + 1 for row in rows])]
            self._compare(self._steps(bucket, rows), rows, prefixes, outcome)
        return outcome

    def _compare(
        self, steps: Iterable[Step], rows: list[ReplayedRow], prefixes: Prefixes, outcome: dict[str, Any]
    ) -> None:
        for step in steps:
            live = [rows[slot] for slot in step.slots]
            outcome["executables"].append(self.executor.executable_of(step))
            first = self._replay(step, live, prefixes, NAN)
            if self._makes_past(step.phase, live):
                self._keep_past(step.slots[0], self._whole, self.probes[live[0].probe].adapter)
            ends = [(slot, row.past, row.position + 1) for slot, row in zip(step.slots, live, strict=True)]
            outcome["beyond"] += beyond_in(self.executor, ends)
            if self.executor.bundle.sample_top_k:
                outcome["top_differs"] = outcome.get("top_differs", 0) + self._top_differs(first)
            second = self._replay(step, live, prefixes, LARGE) if outcome["runs"] > 1 else first
            with np.errstate(invalid="ignore"):  # infinity minus infinity
                change = float(np.abs(first - second).max())
            outcome["leak"] = max(outcome["leak"], change if np.isfinite(change) else float("1e30"))
            outcome["longest"] = max(outcome["longest"], *(row.position + 1 for row in live))
            for got, row in zip(np.nan_to_num(first), live, strict=True):
                wanted = self._wanted(row)
                best = int(got.argmax())
                outcome["kl"].append(kl_divergence(wanted, got))
                outcome["equal"].append(best == int(wanted.argmax()) or tied(wanted, best))
                outcome["max_abs"] = max(outcome["max_abs"], float(np.abs(got - wanted).max()))

    def _wanted(self, row: ReplayedRow) -> NDArray[np.float32]:
        probe = self.probes[row.probe]
        wanted: NDArray[np.float32] = probe.logits[int(np.searchsorted(probe.positions, row.position))]
        return wanted

    def _unreached(self, bucket: Bucket) -> int:
        """Tokens by which a server's longest sequence in the bucket may exceed the long sequence."""
        limits, long = self.plan.limits, len(self.probes[-1].tokens)
        longest = limits.longest_prompt if bucket.phase == "prompt" else limits.max_model_len - 1
        return max(
            0, min(bucket.context + bucket.query, longest) - min(long, self.executor.capabilities.cache_tokens or long)
        )

    def _past_length(self, bucket: Bucket) -> int:
        length = min(len(self.probes[-1].tokens), past_length(bucket, self.plan.limits, self.beyond))
        return min(length, self.executor.capabilities.cache_tokens or length)

    @property
    def _cuts(self) -> bool:
        """Whether the beginning of a prefix is a prefix."""
        return self.executor.bundle.cache_shape.rewind.free

    def _prefix(self, length: int, adapter: int) -> list[NDArray[np.float32]]:
        """The cache of so many tokens of the long sequence, to be cut for each row; empty where recurrent state or ring
        buffers forbid cutting."""
        key = length, adapter
        if key not in self._prefixes:
            empty(self.executor)
            self._prefill(length, adapter)
            self._keep_past(0, length, adapter)
        return self._prefixes[key]

    def _keep_past(self, slot: int, length: int, adapter: int) -> None:
        key = length, adapter
        self._prefixes[key] = self.executor.export_prefix(slot, length) if self._cuts else []
        self._prefixes_beyond[key] = beyond_in(self.executor, [(slot, 0, length)])

    @property
    def _whole(self) -> int:
        """Tokens of the longest past that one prefill makes, the same for every caller; 0: none does."""
        long = len(self.probes[-1].tokens)
        length = min(long, self.plan.limits.longest_prompt, self.executor.capabilities.cache_tokens or long)
        one = self.executor.capabilities.exact and self._cuts and length <= prompt_chunk(self.plan, self.executor)
        return length if one else 0

    def _makes_past(self, phase: str, rows: Sequence[ReplayedRow]) -> bool:
        alone = phase == "prompt" and [(row.position + 1, row.past) for row in rows] == [(self._whole, 0)]
        return alone and rows[0].probe in self._long.values()

    def _prefill(self, length: int, adapter: int) -> None:
        """Put so many tokens of the long sequence into slot 0: by the bundle's prefill graphs, and beyond the longest
        prompt, token by token, by its decode graphs."""
        long = self.probes[-1].tokens.tolist()
        prompt = min(length, self.plan.limits.longest_prompt)
        for step in prompt_steps(self.plan, self.executor, 0, long[:prompt]):
            self.executor.run(replace(step, adapters=(adapter,)))
        for past in range(prompt, length):
            step = decode_step(self.plan, self.executor, [long[past]], [past])
            self.executor.run(replace(step, adapters=(adapter,)))

    def _rows(self, bucket: Bucket, prefix: int, first: int) -> Iterator[ReplayedRow]:
        """Ragged rows for a bucket: the first as long as fits, then where the model turns, the others spread below.

        The first one has adapter `first`, each other the next.
        """
        for at in range(bucket.batch):
            fits = self._fits(bucket, prefix, (first + at) % len(self._long))
            turns = [row for row in fits if row.position in self.turning][: bucket.batch - 1]
            if 0 < at <= len(turns):
                yield turns[at - 1]
            elif fits:
                yield fits[round(np.linspace(len(fits) - 1, 0, bucket.batch)[at])]

    def _fits(self, bucket: Bucket, prefix: int, adapter: int) -> list[ReplayedRow]:
        """The rows that a bucket takes with an adapter, shortest first."""
        if bucket.context == 0:
            own = [(i, probe) for i, probe in enumerate(self.probes) if probe.adapter == adapter]
            fits = [ReplayedRow(i, int(p), 0) for i, probe in own for p in probe.positions if p < bucket.query]
            return sorted(fits, key=lambda r: r.position)
        fits, long = [], self._long[adapter]
        for p in self.probes[long].positions.tolist():
            new = min(bucket.query, max(1, p + 1 - bucket.context // 2), p + 1)
            past = p + 1 - new
            if past <= min(bucket.context, prefix):
                fits.append(ReplayedRow(long, p, past))
        return sorted(fits, key=lambda r: r.past)

    def _tokens(self, row: ReplayedRow) -> list[int]:
        tokens: list[int] = self.probes[row.probe].tokens[row.past : row.position + 1].tolist()
        return tokens

    def _steps(self, bucket: Bucket, rows: list[ReplayedRow]) -> Iterator[Step]:
        tokens, past = [self._tokens(r) for r in rows], [r.past for r in rows]
        if not self.executor.capabilities.exact:
            yield pad(bucket, range(len(rows)), tokens, past)
        elif self.executor.capabilities.ragged:
            # a past that decode continues is computed alone
            whole = int(len(rows) > 1 and self._makes_past(bucket.phase, rows[:1]))
            if whole:
                yield exact("prompt", [0], tokens[:1], [0])
            yield ragged(bucket.phase, range(whole, len(rows)), tokens[whole:], past[whole:])
        elif bucket.phase == "decode":
            yield exact("decode", range(len(rows)), tokens, past)
        else:
            for i in range(len(rows)):
                yield exact("prompt", [i], [tokens[i]], [past[i]])

    def _replay(self, step: Step, live: list[ReplayedRow], prefixes: Prefixes, nan_fill: float) -> NDArray[np.float32]:
        empty(self.executor)
        past = {slot: row.past for slot, row in zip(step.slots, live, strict=True)}
        adapters = [self.probes[row.probe].adapter for row in live]
        adapter_of = dict(zip(step.slots, adapters, strict=True))
        for slot in sorted((slot for slot in past if past[slot]), reverse=True):
            if self._cuts:
                self.executor.import_prefix(slot, [t[:, : past[slot]] for t in prefixes[adapter_of[slot]]])
                continue
            self._prefill(past[slot], adapter_of[slot])
            self.executor.copy_prefix(0, slot, past[slot])
        for slot in range(self.executor.slots):
            self.executor.nan_fill(slot, past.get(slot, 0), nan_fill)
        live_tokens = np.arange(step.query)[None] < step.new_lengths[:, None]
        live_tokens[len(live) :] = False
        pads = self.random.integers(0, self.vocab_size, step.token_ids.shape)
        step.token_ids[:] = np.where(live_tokens, step.token_ids, pads)
        if len(self._long) > 1:  # rows without a request may have any
            adapters += self.random.integers(0, len(self._long), step.batch - len(live)).tolist()
            step = replace(step, adapters=tuple(adapters))
        if self.executor.bundle.sample_top_k:
            self._top = self.executor.run_top(step)
            return self.executor.logits()[: len(live)].copy()
        return self.executor.run(step)[: len(live)].copy()

    def _top_differs(self, logits: NDArray[np.float32]) -> int:
        """Rows of the last step whose top logits are not exactly the largest of `logits`."""
        wanted, count = top_of(logits, self.executor.bundle.sample_top_k), len(logits)
        same = (wanted.values == self._top.values[:count]) & (wanted.ids == self._top.ids[:count])
        return int((~same.all(-1) & np.isfinite(logits).all(-1)).sum())

    def _nan_fill(self, value: float) -> None:
        for slot in range(self.executor.slots):
            self.executor.nan_fill(slot, 0, value)


class Agreement(Verification):
    """The checks of an opened finished bundle against its opened portable half, bucket by bucket."""

    def __init__(self, bundle: Bundle, executor: Executor, half: Bundle, portable: Executor, beyond: int) -> None:
        probes = agreement_probes(bundle)
        super().__init__(bundle, executor, probes, [], beyond, ())
        self._trusted = Verification(half, portable, probes, [], beyond, ())
        self._expected: dict[ReplayedRow, NDArray[np.float32]] = {}

    def _replay(self, step: Step, live: list[ReplayedRow], prefixes: Prefixes, nan_fill: float) -> NDArray[np.float32]:
        if np.isnan(nan_fill):
            self._expected = dict(zip(live, self._trusted._replay(step, live, prefixes, NAN), strict=True))
            empty(self._trusted.executor)
        return super()._replay(step, live, prefixes, nan_fill)

    def _wanted(self, row: ReplayedRow) -> NDArray[np.float32]:
        return self._expected[row]


def agreement_probes(bundle: Bundle) -> Sequence[Probe]:
    """The sequences that rows are cut from, the long one last, without logits: llmc's own texts, or pseudo-random ids
    where the bundle has no tokenizer."""
    limits, vocab_size = bundle.plan.limits, bundle.size("vocab_size")
    farthest = max(1, min(LONGEST, limits.max_model_len - 1))
    try:
        encode = bundle.tokenizer.encode
        found = [*(encode(text) for text in PROMPTS), long_text(encode, farthest)]
    except ArtifactError:
        found = []
    random = np.random.default_rng(0)
    if not found or len(found[-1]) < farthest:
        found = [random.integers(0, vocab_size, length).tolist() for length in (8, 21, 12, 30, 17, 5, farthest)]
    cut = [tokens[: limits.longest_prompt + 1] for tokens in found[:-1]] + [found[-1]]
    return [
        Probe(np.array(tokens, np.int64), len(tokens), np.array(positions_of(len(tokens), ()), np.int64), _NONE)
        for tokens in cut if tokens
    ]  # fmt: skip


_NONE: NDArray[np.float32] = np.zeros((0, 0), np.float32)
