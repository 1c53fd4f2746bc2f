"""The parts of verification. They depend only on the plan and the model's size, and are the same on every host.

Greedy texts, the accuracy over a text, every executable, and the smallest and largest bucket of each phase always run.
Sampled buckets run a second time with another fill of the unused cache, as long as the work stays within BUDGET. It
counts all runs of buckets, and the steps for a past beyond the longest prompt. The smallest bucket of each phase always
runs twice. Beyond the budget, sampled buckets whose executables other buckets run are skipped.

Outcomes come from the store, which others may have written: `readable` checks their form.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import isfinite
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from llmc.artifacts.digest import digest_bytes
from llmc.buckets.bucket import PHASES

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket
    from llmc.buckets.limits import Limits
    from llmc.compiler.verification.limits import VerificationPolicy

Check = Callable[[Any], bool]


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _number(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _number_or_none(value: Any) -> bool:
    return value is None or _number(value)


def _list(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(check(one) for one in value)


_BUCKET: Mapping[str, Check] = {
    "runs": _count, "kl": _list(_number), "equal": _list(lambda value: isinstance(value, bool)), "max_abs": _number,
    "leak": _number, "longest": _count, "executables": _list(_text), "beyond": _count,
    "unreached": _count,
}  # fmt: skip
_GREEDY: Mapping[str, Check] = {"sequences": _count, "differing": _list(_text)}
_ACCURACY: Mapping[str, Check] = {
    "tokens": lambda value: _count(value) and value > 0, "mean_kl": _number, "p99_kl": _number, "max_kl": _number,
    "top1": _number, "parts": lambda value: isinstance(value, dict) and all(map(_number, value.values())),
    "text": _text, "perplexity": _number_or_none, "reference_perplexity": _number_or_none,
}  # fmt: skip


def readable(part: VerifiedPart, outcome: Mapping[str, Any]) -> bool:
    """Whether `outcome` has the form of a run of `part`; if not, the part runs again."""
    if part == "greedy":
        return _has(outcome, _GREEDY)
    if part == "accuracy":
        return isinstance(outcome.get("accuracy"), dict) and _has(outcome["accuracy"], _ACCURACY)
    bucket, runs = (part.bucket, 1) if isinstance(part, Once) else (part, 2)
    if outcome.get("bucket") != str(bucket) or outcome.get("runs") != runs or not _has(outcome, _BUCKET):
        return False
    return len(outcome["kl"]) == len(outcome["equal"]) and _count(outcome.get("top_differs", 0))


def _has(found: Mapping[str, Any], wanted: Mapping[str, Check]) -> bool:
    return all(name in found and check(found[name]) for name, check in wanted.items())


SAMPLES = 4
"""Sampled buckets of each phase."""

BUDGET = 1.2e13
"""Floating-point operations of all runs of buckets, above which no second run is added: 45,000 tokens of a model of 135
million parameters, which take about a minute on two cores."""

CHEAP = 1 / 16
"""Share of BUDGET that second runs always have: decode buckets cost next to nothing."""

STEPPED = BUDGET / 8
"""Floating-point operations of the decode steps that lengthen a past beyond the longest prompt; part of BUDGET."""

LEAST = 16
"""Least tokens that a run counts for: a shorter run takes as long, because it reads all weights."""


@dataclass(frozen=True)
class Once:
    """A bucket that runs once, to run the executable that serves it."""

    bucket: Bucket

    def __str__(self) -> str:
        return f"{self.bucket} once"


VerifiedPart: TypeAlias = 'Bucket | Once | Literal["greedy", "accuracy"]'
"""A part with its own outcome: a bucket, run twice with two fills of the unused cache, or once; greedy texts over the
whole bundle; or its divergence over a text."""


class SizedExecutable(Protocol):
    """An executable, or the shape of one; None where a size stays dynamic."""

    @property
    def phase(self) -> str:
        """Prompt, decode or any."""

    @property
    def batch(self) -> int | None:
        """Number of sequences."""

    @property
    def query(self) -> int | None:
        """New tokens per sequence."""

    @property
    def context(self) -> int | None:
        """Cached tokens per sequence."""


E = TypeVar("E", bound=SizedExecutable)


class ServingExecutables(Generic[E]):
    """The executables that may serve a bucket: those of its shape, or of every shape."""

    def __init__(self, policy: VerificationPolicy, executables: Iterable[E]) -> None:
        self._policy = policy
        self._of: dict[tuple[str, int | None, int | None, int | None], list[E]] = defaultdict(list)
        for e in executables:
            self._of[e.phase, e.batch, e.query, e.context].append(e)

    def of(self, bucket: Bucket) -> list[E]:
        """Executables for `bucket`, in no particular order."""
        run = self._policy.runs_as(bucket)
        batch, query, context = ((None, size) for size in (run.batch, run.query, run.context))
        shapes = product(("any", bucket.phase), batch, query, context)
        return [e for shape in shapes for e in self._of.get(shape, ())]


@dataclass(frozen=True)
class ChosenParts:
    """The parts to run for `planned` buckets, in order.

    Of the sampled buckets that do not fit into the budget `left_out` run once, and `not_run` not at all.
    """

    parts: tuple[VerifiedPart, ...]
    planned: int
    left_out: tuple[str, ...]
    not_run: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The choice for the manifest."""
        return {"planned": self.planned, "left_out": list(self.left_out), "not_run": list(self.not_run)}


def sample_buckets(buckets: Sequence[Bucket], every: bool) -> list[Bucket]:
    """All buckets, or of each phase the smallest, the largest and SAMPLES − 2 others.

    The others have the lowest digests of their names: one more bucket in the plan hardly changes this choice.
    """
    if every:
        return list(buckets)
    chosen: list[Bucket] = []
    for order in _by_size(buckets):
        between = sorted(order[1:-1], key=lambda b: digest_bytes(str(b).encode()))[: SAMPLES - 2]
        chosen += dict.fromkeys([order[0], *between, order[-1]])
    return chosen


def choose(
    buckets: Sequence[Bucket], limits: Limits, every: bool, policy: VerificationPolicy,
    executables: Iterable[SizedExecutable], parameters: int,
) -> ChosenParts:  # fmt: skip
    """Choose the parts to verify for a plan's `buckets` and a model of `parameters` weights.

    They are greedy texts, the sampled buckets, one bucket for each other executable, and the text. `every`: all buckets
    twice, at any cost. Prefill buckets come before decode, those that begin a sequence before those that continue one.
    """
    sampled, serving = sample_buckets(buckets, every), ServingExecutables(policy, executables)
    run = {e for bucket in sampled for e in serving.of(bucket)}
    once: list[Bucket] = []
    for bucket in sorted(buckets, key=lambda b: _for_executable(b, policy)) if policy.each else ():
        more = [e for e in serving.of(bucket) if e not in run]
        if more:
            run.update(more)
            once.append(bucket)
    needed = sampled if every else _in_any_case(sampled, serving)
    twice = sampled if every else [order[0] for order in _by_size(sampled)]
    left = BUDGET - sum(operations(bucket, parameters) for bucket in [*needed, *twice, *once])
    left -= steps_beyond(limits, parameters) * 2.0 * parameters * LEAST
    left = max(left, BUDGET * CHEAP)
    parts: list[Bucket | Once] = [*twice, *map(Once, once)]
    for bucket in sorted(set(sampled).difference(twice), key=lambda b: (operations(b, parameters), b)):
        further = operations(bucket, parameters) * (1 if bucket in needed else 2)
        if further <= left:
            left -= further
            parts.append(bucket)
        elif bucket in needed:
            parts.append(Once(bucket))
    ran = {bucket_of(part): isinstance(part, Once) for part in parts}
    left_out, not_run = (
        tuple(str(bucket) for bucket in sorted(sampled) if ran.get(bucket) is how) for how in (True, None)
    )
    return ChosenParts(("greedy", *sorted(parts, key=_order), "accuracy"), len(buckets), left_out, not_run)


def _in_any_case(sampled: Sequence[Bucket], serving: ServingExecutables[SizedExecutable]) -> list[Bucket]:
    """The smallest and largest of each phase, and those whose executable no earlier one runs."""
    ends = [end for order in _by_size(sampled) for end in (order[0], order[-1])]
    run: set[SizedExecutable] = set()
    found = []
    for bucket in dict.fromkeys([*ends, *sampled]):
        served = set(serving.of(bucket))
        if bucket in ends or not served <= run:
            found.append(bucket)
            run |= served
    return found


def operations(bucket: Bucket, parameters: int) -> float:
    """Floating-point operations of one run of a bucket, including padding, without attention."""
    return 2.0 * parameters * max(bucket.tokens, LEAST)


def steps_beyond(limits: Limits, parameters: int) -> int:
    """Decode steps that lengthen a past beyond the longest prompt, for a model of `parameters` weights.

    They reach a server's last step, as far as STEPPED allows.
    """
    last = limits.max_model_len - 2  # leaves room for the step's token and the one after it
    return max(0, min(last - limits.longest_prompt, int(STEPPED / (2.0 * max(1, parameters) * LEAST))))


def past_length(bucket: Bucket, limits: Limits, beyond: int) -> int:
    """Tokens of the past that rows of a bucket are cut from, which buckets share: the longest prompt, or for decode of
    longer contexts the past that `beyond` more steps make."""
    if not bucket.context:
        return 0
    far = bucket.phase == "decode" and bucket.context > limits.longest_prompt
    return limits.longest_prompt + far * beyond


def bucket_of(part: Bucket | Once) -> Bucket:
    """The bucket that a part runs."""
    return part.bucket if isinstance(part, Once) else part


def _by_size(buckets: Iterable[Bucket]) -> list[list[Bucket]]:
    """Buckets of each phase that has some, smallest first."""
    order = sorted(buckets, key=lambda b: (b.tokens * (1 + b.context), b))
    phases = [[bucket for bucket in order if bucket.phase == phase] for phase in PHASES]
    return [phase for phase in phases if phase]


def _for_executable(bucket: Bucket, policy: VerificationPolicy) -> tuple[int, int, int, Bucket]:
    """Sort key: how often the bucket's executable runs, ascending, then size, descending."""
    return bucket.batch // policy.runs_as(bucket).batch, -bucket.tokens, -bucket.context, bucket


def _order(part: Bucket | Once) -> tuple[bool, int, Bucket]:
    bucket = bucket_of(part)
    return bucket.phase != "prompt", bucket.context, bucket
