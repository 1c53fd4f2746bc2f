"""The plug-in's planner, stated once more and independently, number by number, in Python's floats."""

from __future__ import annotations

import math

from llmc.integrations.vllm_gaudi.config import GaudiView

Bucket = tuple[int, int, int]


def spread(low: int, step: int, high: int, number: int, contiguous: bool) -> list[int]:
    first = step if low < 2 else low
    if number <= 1:
        return [high]
    picked = set()
    for turn in range(number):
        exact = first * math.pow(high / first, (1.0 / float(number - 1)) * turn)
        picked.add(high if contiguous and turn == number - 1 else math.ceil(exact / step) * step)
    if low < 2:
        picked.add(low)
    ordered = sorted(picked)
    ordered[-1] = min(ordered[-1], high)
    return ordered


def ramp(low: int, step: int, high: int) -> list[int]:
    """Doublings of `low` below `step`, and the multiples of it, up to `high`; a `low` of 0 is kept beside those."""
    start = low or step
    doubled = {start * 2**turn for turn in range(40) if start * 2**turn < step}
    even = {value for value in range(start, high + 1) if value % step == 0}
    return sorted({value for value in doubled if value <= high} | even | ({0} if low == 0 else set()))


def sparse(low: int, step: int, high: int, gap: int, percent: int) -> list[int]:
    """Multiples of `step` above the doublings of `low`, without those whose neighbours pad little."""
    kept = [low]
    while kept[-1] <= step and max(1, 2 * kept[-1]) <= high:
        kept.append(max(1, 2 * kept[-1]))
    here = kept[-1] if kept[-1] > step else high + 1
    while here <= high:
        spare = here + step - kept[-1] - 1
        if here != kept[-1] and (spare / (here + step) > percent / 100 or spare > gap or here % gap == 0):
            kept.append(here)
        here += step
    return kept if kept[-1] == high else [*kept, high]


def prompt_ranges(view: GaudiView) -> tuple[list[int], list[int], list[int]]:
    length, tokens, block, seqs = view.model_len, view.tokens, view.block, view.prefill
    if view.strategy == "lin":
        return ramp(1, 1, seqs), ramp(block, block, tokens), ramp(0, 1, (length - block) // block)
    if view.strategy == "pad":
        return (
            sparse(1, 1, seqs, math.ceil(seqs / 4), 25), sparse(block, block, tokens, math.ceil(tokens / 4), 25),
            sparse(0, 2, math.ceil((length - block) / block), math.ceil(tokens / block), 25),
        )  # fmt: skip
    widest = max(1, math.ceil((length - (tokens if length >= 8192 else block)) // block))
    return (
        spread(1, 2, seqs, math.ceil(math.log2(seqs)) + 1, view.contiguous),
        spread(block, block, tokens, math.ceil(math.log2(tokens)), view.contiguous),
        spread(0, 1, widest, 2 if widest == 1 else math.ceil(math.log2(widest)) + 1, view.contiguous),
    )


def decode_ranges(view: GaudiView) -> tuple[list[int], list[int]]:
    seqs, block = view.seqs, view.block
    if view.strategy == "lin":
        high = view.pool if view.contiguous else max(view.model_len * seqs // block, block)
        return ramp(1, 32, seqs), ramp(1, block, high)
    if view.strategy == "pad":
        high = view.pool if view.contiguous else max(math.ceil(view.model_len * seqs / block), block)
        low = block if block <= view.pool else max(1, view.pool - block)
        return sparse(1, 2, seqs, math.ceil(seqs / 4), 25), sparse(low, block, high, math.ceil(high / 4), 25)
    most = math.ceil(view.model_len / block) * seqs
    most = min(view.pool, most) if view.contiguous else min(most, 3 * view.pool)
    batches = spread(1, 2, seqs, math.ceil(math.log2(seqs)) + 1, view.contiguous)
    return batches, spread(1, seqs, most, math.ceil(math.log2(most)) + 1, view.contiguous)


def prompt_buckets(view: GaudiView) -> set[Bucket]:
    length, block = view.model_len, view.block
    batches, queries, contexts = prompt_ranges(view)
    found = set()
    for batch in batches:
        for start in contexts:
            context = start
            for query in queries:
                if start == max(contexts) and length >= 8192 and (length - query) // block >= 0:
                    context = (length - query) // block
                fits = context <= math.ceil((length - 1) / block) and query <= length
                if fits and batch * query <= view.tokens:
                    found.add((batch, query, context))
    return found


def decode_buckets(view: GaudiView) -> set[Bucket]:
    each = math.ceil(view.model_len / view.block)
    batches, contexts = decode_ranges(view)
    if view.contiguous and max(contexts) < view.pool:
        contexts.append(view.pool)
    found = set()
    for batch in batches:
        for context in contexts:
            if view.contiguous:
                found.add((batch, 1, context))
            elif batch <= context:
                found.add((batch, 1, min(context, batch * each)))
    for batch, _, context in list(found) if view.drafts else ():
        rows = 1 + view.drafts
        for wide in (context, context * rows):
            if wide > context or batch * rows <= context:
                limit = wide if view.contiguous else min(wide, batch * rows * each)
                found.add((batch * rows, 1, limit))
    return found


def take(prepared: list[Bucket], requested: Bucket) -> Bucket | None:
    for bucket in sorted(prepared):
        if all(have >= need for have, need in zip(bucket, requested, strict=True)):
            return bucket
    return None
