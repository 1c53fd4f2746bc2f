"""The amount of verification, counted from a plan: executables opened, steps run, and tokens of their prompts.

Of buckets and pasts that is what parts.py chooses; of greedy texts and the text it follows how these are cut into
steps, but for the last few of ragged ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmc.compiler.verification.parts import Once, ServingExecutables, bucket_of, choose, past_length, steps_beyond

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket
    from llmc.buckets.limits import Limits
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.targets.base import Target


@dataclass(frozen=True)
class VerifyWork:
    """Executables that are opened, steps that are run, and the tokens of the prompts among these, padding included
    where executables have one shape."""

    executables: int
    steps: int
    tokens: int

    def __add__(self, other: VerifyWork) -> VerifyWork:
        return VerifyWork(self.executables + other.executables, self.steps + other.steps, self.tokens + other.tokens)


def count(
    buckets: Sequence[Bucket], limits: Limits, target: Target, options: CompileOptions, parameters: int,
    turns: Sequence[int] = (),
) -> VerifyWork:  # fmt: skip
    """Of a plan's `buckets`, for a target with its configured options and a model of so many `parameters`, which
    `turns` there (`turns_of`)."""
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
        tokens //= 2  # rows are spread evenly from the longest to the shortest
    prompts = [min(past, limits.longest_prompt) for past in pasts]
    steps += len(pasts) + sum(pasts) - sum(prompts)  # one for each token beyond the longest prompt
    run = 0 if padded else min(longest, limits.max_num_batched_tokens)  # of a bucket, which decode then continues
    tokens += sum(past for past in prompts if past > run)
    return VerifyWork(len(opened), steps, tokens) + _texts(buckets, limits, target, padded, parameters)


def _texts(buckets: Sequence[Bucket], limits: Limits, target: Target, padded: bool, parameters: int) -> VerifyWork:
    """Greedy texts, and the accuracy over the text, as many sequences at once as the plan allows."""
    from llmc.compiler.verification.accuracy import PORTABLE
    from llmc.compiler.verification.probes import PROMPTS, continuations
    from llmc.compiler.verification.texts import TEXTS
    from llmc.compiler.verification.windows import FIRST, text_tokens

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
    """Tokens that are computed for a prompt of so many."""
    fitting = [b.tokens for b in buckets if b.phase == "prompt" and b.query >= length]
    return min(fitting, default=length) if padded else length
