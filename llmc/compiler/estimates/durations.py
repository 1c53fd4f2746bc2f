"""Times of the shared parts of a compile: stages, and verification with its amount of work.

Measurements in this store come first: the last builds of a stage for a model of the same size. Without them the times
of SmolLM2-135M on two cores (Timing) are scaled to the model. Tracing scales with its layers, everything else with its
parameters.

The amount of verification is executables opened, steps run, and prompt tokens. parts.py chooses the buckets and pasts
that are counted. Greedy texts and the accuracy text are counted as they are cut into steps, except for the last steps
of ragged ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING

from llmc.compiler.targets.costs import LAYERS, REFERENCE, Costs, Timing
from llmc.compiler.verification.parts import Once, ServingExecutables, bucket_of, choose, past_length, steps_beyond

if TYPE_CHECKING:
    from llmc.artifacts.store.entries import Entry
    from llmc.artifacts.store.store import Store
    from llmc.buckets.bucket import Bucket
    from llmc.buckets.limits import Limits
    from llmc.compiler.architectures.shared.size import ModelSize
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.targets.base import Target


RECENT = 32
"""Recent builds in the store whose median is the typical time."""

METADATA = "parameters"
"""Name of the parameter count in a stage entry's metadata."""


class Durations:
    """Durations for one model, device and configured options; without a `store` all are estimates."""

    def __init__(
        self, costs: Costs, options: CompileOptions, model: ModelSize | None, parameters: int, store: Store | None
    ) -> None:
        self._costs, self._options, self._store = costs, options, store
        self._layers, self._parameters = (model.layers if model else LAYERS), parameters

    def stages(self, buckets: Sequence[Bucket], without: Iterable[str] = ()) -> dict[str, float]:
        """Seconds of each shared stage, except those in `without`."""
        costs = self._costs.stage_costs(self._options, buckets)
        return {kind: self._stage(kind, cost) for kind, cost in costs.items() if kind not in without}

    def verification(self, work: VerifyWork, reference: bool = True) -> float:
        """Seconds of this much verification; `reference` False leaves out the reference's run."""
        each = self._costs.verifying
        seconds = (
            self._of(each.begin) + work.executables * self._of(each.opened) + work.steps * self._of(each.step)
            + work.tokens / 1000 * self._of(each.tokens)
        )  # fmt: skip
        return seconds + (self._stage("reference", REFERENCE) if reference else 0.0)

    def measured(self, kind: str) -> float | None:
        """Typical seconds of a stage's last builds in the store, or None."""
        if self._store is None:
            return None
        return typical(e for e in self._store.entries(kind) if e.meta.get(METADATA) == self._parameters)

    def _stage(self, kind: str, cost: Timing) -> float:
        seen = self.measured(kind)
        return self._of(cost) if seen is None else seen

    def _of(self, cost: Timing) -> float:
        return cost.of(self._layers, self._parameters)


def typical(entries: Iterable[Entry]) -> float | None:
    """Median build time of the last of `entries`, or None."""
    timed = (float(entry.meta["seconds"]) for entry in entries if "seconds" in entry.meta)
    recent = list(islice(timed, RECENT))
    return median(recent) if recent else None


def of_target(store: Store, target: str) -> Iterable[Entry]:
    """A target's executables in the store."""
    return (entry for entry in store.entries("executable") if entry.key.components.get("target") == target)


@dataclass(frozen=True)
class VerifyWork:
    """Numbers of executables opened, steps run, and prompt tokens in them; tokens include padding where executables
    have one shape."""

    executables: int
    steps: int
    tokens: int

    def __add__(self, other: VerifyWork) -> VerifyWork:
        return VerifyWork(self.executables + other.executables, self.steps + other.steps, self.tokens + other.tokens)


def count(
    buckets: Sequence[Bucket], limits: Limits, target: Target, options: CompileOptions, parameters: int,
    turns: Sequence[int] = (),
) -> VerifyWork:  # fmt: skip
    """Count the verification work of a plan's `buckets`, for a target's configured options and a model of `parameters`
    weights whose behaviour changes at `turns` (`turns_of`)."""
    from llmc.compiler.verification.probes import reach_of

    shapes = target.shapes(buckets, options)
    policy = target.verification
    serving, padded = ServingExecutables(policy, shapes), bool(target.fixes(options).dims)
    chosen = choose(buckets, limits, options.verify == "all", policy, shapes, parameters)
    beyond, reach = steps_beyond(limits, parameters), reach_of(parameters, turns)
    opened, steps, tokens, pasts, longest = set(), 0, 0, set(), 0
    for part in chosen.parts:
        if isinstance(part, str):
            continue
        bucket, runs = bucket_of(part), 1 if isinstance(part, Once) else 2
        opened.update(serving.of(bucket))
        steps += runs
        if bucket.phase == "prompt":
            tokens += runs * bucket.tokens
            longest = max(longest, 0 if bucket.context else bucket.query)
        if bucket.context:
            pasts.add(min(past_length(bucket, limits, beyond), reach))
    if not padded:
        tokens //= 2  # row lengths spread evenly from the longest to the shortest
    prompts = [min(past, limits.longest_prompt) for past in pasts]
    steps += len(pasts) + sum(pasts) - sum(prompts)  # one step per token beyond the longest prompt
    run = 0 if padded else min(longest, limits.max_num_batched_tokens)  # a prefill that decode continues
    tokens += sum(past for past in prompts if past > run)
    return VerifyWork(len(opened), steps, tokens) + _texts(buckets, limits, target, padded, parameters)


def _texts(buckets: Sequence[Bucket], limits: Limits, target: Target, padded: bool, parameters: int) -> VerifyWork:
    """Greedy texts and the accuracy text, with as many sequences at once as the plan allows."""
    from llmc.compiler.verification.accuracy import PORTABLE
    from llmc.compiler.verification.probes import FIRST, PROMPTS, continuations, text_tokens
    from llmc.compiler.verification.texts import TEXTS

    share, together = text_tokens(parameters) // len(TEXTS), limits.max_num_seqs
    size = min(limits.longest_prompt + 1, share)
    first, last = min(FIRST, size // 2), PORTABLE if target.state == "portable" else share
    read: list[int] = []
    for end in [min(start + size, share) - start for start in range(0, share, size)][::-1]:
        if end > first and sum(min(length - first, last) for length in read) < last:
            read.append(end)
    lengths = sorted(read * len(TEXTS), reverse=True)
    prompts = [max(first, length - last + 1) if padded else length // 2 for length in lengths]
    built = continuations(parameters)
    steps = sum(length - prompt for length, prompt in zip(lengths[::together], prompts[::together], strict=True))
    prompts += [size // 3] * len(PROMPTS)
    tokens = sum(_prompt(buckets, prompt, padded) for prompt in prompts)
    return VerifyWork(0, steps + max(built[-1], sum(built) // together) + len(prompts), tokens)


def _prompt(buckets: Sequence[Bucket], length: int, padded: bool) -> int:
    fitting = [b.tokens for b in buckets if b.phase == "prompt" and b.query >= length]
    return min(fitting, default=length) if padded else length
