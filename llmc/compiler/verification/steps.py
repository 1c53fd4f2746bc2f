"""Steps that verification runs, cut and padded as an engine would cut and pad them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmc.buckets.lookup import prefill_path
from llmc.buckets.plan import Plan
from llmc.errors import InputError
from llmc.runtime.executors.base import Executor
from llmc.runtime.step import Step, exact, pad


def prompt_steps(plan: Plan, executor: Executor, slot: int, prompt: Sequence[int]) -> Iterator[Step]:
    """Steps that prefill one prompt in slot `slot`, as the plan cuts it."""
    if executor.capabilities.exact:
        chunk = prompt_chunk(plan, executor)
        for start in range(0, len(prompt), chunk):
            yield exact("prompt", [slot], [prompt[start : start + chunk]], [start])
        return
    for part in prefill_path(plan, [len(prompt)]):
        ((start, end),) = part.spans
        yield pad(part.bucket, [slot], [prompt[start:end]], [start])


def prompt_chunk(plan: Plan, executor: Executor) -> int:
    """Prompt tokens that one step of an exact executor takes."""
    limit = plan.limits.max_num_batched_tokens
    return min(limit, executor.capabilities.prompt_chunk or limit)


def decode_step(plan: Plan, executor: Executor, tokens: Sequence[int], past: Sequence[int]) -> Step:
    """One new token for each of the first slots. Raises InputError where no bucket covers them."""
    rows = [[token] for token in tokens]
    if executor.capabilities.exact:
        return exact("decode", range(len(rows)), rows, past)
    bucket = plan.lookup("decode", len(rows), 1, max(past))
    if bucket is None:
        raise InputError(f"no decode bucket covers batch {len(rows)} with {max(past)} cached tokens; plan anew")
    return pad(bucket, range(len(rows)), rows, past)


def fitting(executor: Executor, lengths: Sequence[int]) -> int:
    """Number of sequences, from the first on, that an empty cache has room for together."""
    room = executor.capabilities.cache_tokens
    if room is None:
        return min(len(lengths), executor.slots)
    block, count = executor.capabilities.block_tokens, 0
    for length in lengths[: executor.slots]:
        room -= -(-length // block) * block
        if room < 0:
            break
        count += 1
    return count


def empty(executor: Executor) -> None:
    """Release the contents of slots that share the cache."""
    if executor.capabilities.cache_tokens is not None:
        for slot in range(executor.slots):
            executor.copy_prefix(slot, slot, 0)
