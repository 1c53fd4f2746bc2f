"""Proof that a set of buckets serves every admissible request.

Under `Limits`, these requests are admissible: a prompt of 1 to `longest_prompt` tokens, up to max_num_seqs of them
together; and a decode step of 1 to max_num_seqs sequences with 0 to `longest_past` cached tokens each.

Decode must be covered directly. Covering is monotone, so one corner per batch value decides it.

Prompts may be split into smaller batches and into chunks. A bucket with query q and context c runs 1 to q new tokens
after 0 to c cached ones in any of its rows. From an empty cache, a row can therefore reach exactly c by repeating the
same bucket, and then take q more. The longest prompt with a path is thus the largest context + query of any prompt
bucket, and every shorter one has a path as well.

Where graphs read no cached tokens (`Limits.contexts`), any bucket can follow any past.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llmc.buckets.bucket import PHASES, Bucket, Phase
from llmc.buckets.limits import Limits


@dataclass(frozen=True)
class Gap:
    """Admissible requests that no path serves: every batch in `batches` with every length in `lengths`.

    Both ranges are inclusive. A length is prompt tokens for a prompt, and cached tokens per sequence for decode.
    """

    phase: Phase
    batches: tuple[int, int]
    lengths: tuple[int, int]

    def __str__(self) -> str:
        what = "prompt tokens" if self.phase == "prompt" else "cached tokens"
        return (
            f"{self.phase} batch {self.batches[0]} to {self.batches[1]} "
            f"with {self.lengths[0]} to {self.lengths[1]} {what}"
        )


def prove(limits: Limits, buckets: Iterable[Bucket]) -> list[Gap]:
    """Return every range of admissible requests that a plan of `buckets` cannot serve; an empty list is the proof."""
    known = list(buckets)
    return [gap for phase in PHASES for gap in gaps(limits, known, phase)]


def gaps(limits: Limits, buckets: Iterable[Bucket], phase: Phase) -> list[Gap]:
    """Return the gaps of one phase, for buckets that are not a plan yet; exact, O(n log n) in their number."""
    known = [bucket for bucket in buckets if bucket.phase == phase]
    return _prompt_gaps(limits, known) if phase == "prompt" else _decode_gaps(limits, known)


def _prompt_gaps(limits: Limits, buckets: list[Bucket]) -> list[Gap]:
    reach = max((limits.reach(bucket) for bucket in buckets), default=0)
    if reach >= limits.longest_prompt:
        return []
    return [Gap("prompt", (1, limits.max_num_seqs), (reach + 1, limits.longest_prompt))]


def _decode_gaps(limits: Limits, buckets: list[Bucket]) -> list[Gap]:
    """One gap for each run of batches that share the longest covered context."""
    longest: dict[int, int] = {limits.max_num_seqs: -1}
    for bucket in buckets:
        batch = min(bucket.batch, limits.max_num_seqs)
        longest[batch] = max(longest.get(batch, -1), bucket.context)
    found: list[Gap] = []
    covered = -1
    batches = sorted(longest, reverse=True)
    for batch, below in zip(batches, [*batches[1:], 0], strict=True):
        covered = max(covered, longest[batch])
        if covered >= limits.read(limits.longest_past):
            break
        gap = Gap("decode", (below + 1, batch), (covered + 1, limits.longest_past))
        if found and found[-1].lengths == gap.lengths:
            gap = Gap("decode", (gap.batches[0], found.pop().batches[1]), gap.lengths)
        found.append(gap)
    return found[::-1]
