"""The plug-in's exponential planner, stated once more and independently, number by number, in Python's floats."""

from __future__ import annotations

import math

from llmc.buckets.servers.vllm_gaudi.view import View

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


def prompt_buckets(view: View) -> set[Bucket]:
    length, tokens, block, seqs = view.model_len, view.tokens, view.block, view.prefill
    widest = max(1, math.ceil((length - (tokens if length >= 8192 else block)) // block))
    contexts = spread(0, 1, widest, 2 if widest == 1 else math.ceil(math.log2(widest)) + 1, view.contiguous)
    queries = spread(block, block, tokens, math.ceil(math.log2(tokens)), view.contiguous)
    found = set()
    for batch in spread(1, 2, seqs, math.ceil(math.log2(seqs)) + 1, view.contiguous):
        for start in contexts:
            context = start
            for query in queries:
                if start == max(contexts) and length >= 8192 and (length - query) // block >= 0:
                    context = (length - query) // block
                fits = context <= math.ceil((length - 1) / block) and query <= length
                if fits and batch * query <= tokens:
                    found.add((batch, query, context))
    return found


def decode_buckets(view: View) -> set[Bucket]:
    each = math.ceil(view.model_len / view.block)
    most = each * view.seqs
    most = min(view.pool, most) if view.contiguous else min(most, 3 * view.pool)
    number = math.ceil(math.log2(most)) + 1
    contexts = spread(1, view.seqs, most, number, view.contiguous)
    if view.contiguous and max(contexts) < view.pool:
        contexts.append(view.pool)
    found = set()
    for batch in spread(1, 2, view.seqs, math.ceil(math.log2(view.seqs)) + 1, view.contiguous):
        for context in contexts:
            if view.contiguous:
                found.add((batch, 1, context))
            elif batch <= context:
                found.add((batch, 1, min(context, batch * each)))
    for batch, _, context in list(found):
        rows = 1 + view.drafts
        for wide in (context, context * rows):
            if wide > context or batch * rows <= context:
                limit = wide if view.contiguous else min(wide, batch * rows * each)
                found.add((batch * rows, 1, limit))
    return found


def take(prepared: list[Bucket], asked: Bucket) -> Bucket | None:
    for bucket in sorted(prepared):
        if all(have >= need for have, need in zip(bucket, asked, strict=True)):
            return bucket
    return None
