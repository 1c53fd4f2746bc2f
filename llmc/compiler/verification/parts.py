"""The parts of verification. They depend on the plan and the model's size alone, so they are the same on every host.

Greedy texts, the accuracy over a text, every executable, and of each phase the smallest and the largest bucket are
always run. Sampled buckets are run a second time with another poison, as long as all runs of buckets, and the steps
that make a past longer than the longest prompt, stay within BUDGET; the smallest bucket of each phase always is. Beyond
it, sampled buckets are not run at all whose executables others run.

Outcomes come from the store, which others may have written: `readable` says whether one is of the form that is read.
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
    from llmc.compiler.verification.policy import VerificationPolicy

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


def readable(part: Part, outcome: Mapping[str, Any]) -> bool:
    """Whether `outcome` is what a run of `part` leaves, as far as its form tells; else the part is run."""
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
"""Buckets of each phase that are sampled."""

BUDGET = 1.2e13
"""Floating-point operations of all runs of buckets, above which no second run is added: 45,000 tokens of a model of 135
million parameters, which take about a minute on two cores."""

CHEAP = 1 / 16
"""Share of BUDGET that second runs have in any case: those of decode cost next to nothing."""

STEPPED = BUDGET / 8
"""Floating-point operations of the decode steps that lengthen a past beyond the longest prompt; part of BUDGET."""

LEAST = 16
"""Tokens that a run counts for at least: one of fewer tokens takes as long, since it reads all weights."""


@dataclass(frozen=True)
class Once:
    """A bucket that is run once, to run the executable that serves it."""

    bucket: Bucket

    def __str__(self) -> str:
        return f"{self.bucket} once"


Part: TypeAlias = 'Bucket | Once | Literal["greedy", "accuracy"]'
"""A part, with an outcome of its own: a bucket, which is run twice under two poisons, or once; greedy texts over the
whole bundle; or its divergence over a text."""


class SizedExecutable(Protocol):
    """An executable, or the shape of one: None where a size stays dynamic."""

    @property
    def phase(self) -> str:
        """Prompt, decode or any."""

    @property
    def batch(self) -> int | None:
        """Sequences."""

    @property
    def query(self) -> int | None:
        """New tokens of each."""

    @property
    def context(self) -> int | None:
        """Cached tokens of each."""


E = TypeVar("E", bound=SizedExecutable)


class ServingExecutables(Generic[E]):
    """Which executables may serve a bucket: those of its shape, or of every shape."""

    def __init__(self, policy: VerificationPolicy, executables: Iterable[E]) -> None:
        self._policy = policy
        self._of: dict[tuple[str, int | None, int | None, int | None], list[E]] = defaultdict(list)
        for e in executables:
            self._of[e.phase, e.batch, e.query, e.context].append(e)

    def of(self, bucket: Bucket) -> list[E]:
        """In no particular order."""
        run = self._policy.runs_as(bucket)
        batch, query, context = ((None, size) for size in (run.batch, run.query, run.context))
        shapes = product(("any", bucket.phase), batch, query, context)
        return [e for shape in shapes for e in self._of.get(shape, ())]


@dataclass(frozen=True)
class ChosenParts:
    """The parts to run for `planned` buckets, in order. Of the sampled buckets that do not fit into the budget
    `left_out` are run once, and `not_run` not at all."""

    parts: tuple[Part, ...]
    planned: int
    left_out: tuple[str, ...]
    not_run: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """For the manifest, beside what was found."""
        return {"planned": self.planned, "left_out": list(self.left_out), "not_run": list(self.not_run)}


def sample_buckets(buckets: Sequence[Bucket], every: bool) -> list[Bucket]:
    """All buckets, or of each phase the smallest, the largest and SAMPLES − 2 others.

    The others are those whose name's digest is lowest: a choice that one more bucket in the plan hardly changes.
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
    """What verification runs of a plan's `buckets`, for a model of so many `parameters`: greedy texts, the sampled
    buckets, one for each other executable, and the text. `every`: all buckets twice, whatever that takes.

    Prompt buckets come before decode, those that begin a sequence before those that continue one.
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
    """Of each phase the smallest and the largest, and those that run an executable which the ones before do not."""
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
    """Floating-point operations of one run of a bucket, padding included, attention left out."""
    return 2.0 * parameters * max(bucket.tokens, LEAST)


def steps_beyond(limits: Limits, parameters: int) -> int:
    """Decode steps that lengthen a past beyond the longest prompt, for a model of so many parameters: to the last step
    that a server takes, as far as STEPPED allows."""
    last = limits.max_model_len - 2  # the step's token and the one after it have room
    return max(0, min(last - limits.longest_prompt, int(STEPPED / (2.0 * max(1, parameters) * LEAST))))


def past_length(bucket: Bucket, limits: Limits, beyond: int) -> int:
    """Tokens of the past that rows of a bucket are cut from, so that buckets share it: the longest prompt, or for
    decode of longer contexts what so many steps `beyond` it make."""
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
    """Sorts by the number of times that a bucket's executable runs, ascending, then by size, descending."""
    return bucket.batch // policy.runs_as(bucket).batch, -bucket.tokens, -bucket.context, bucket


def _order(part: Bucket | Once) -> tuple[bool, int, Bucket]:
    bucket = bucket_of(part)
    return bucket.phase != "prompt", bucket.context, bucket
