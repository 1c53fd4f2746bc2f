"""The lists of least padding under the server's own look-up, none of which its filters leave out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product

from llmc.errors import InputError
from llmc.integrations.base import Demand, Lists, Shape
from llmc.integrations.vllm_gaudi import sizes
from llmc.integrations.vllm_gaudi.config import CLAMP, DECODE, PROMPT, View
from llmc.integrations.vllm_gaudi.first_covering import COLUMNS, ROWS, grid, polish, rounded, thinned

ALIGNED = 128
"""Queries are multiples of this many tokens, as all that the plug-in generates with its block size are."""

UNSEEN = 0.001
"""Of all decode steps, the share that counts once more, spread over the server's own buckets: traffic to come is not
just like that of the past, and graphs that would save next to nothing there go where steps may yet be."""

Demands = Mapping[Shape, Demand]


def work(family: str, shape: Shape) -> int:
    """What one run of a bucket costs: batch · (query + context) of a prompt, batch + blocks of a decode.

    A new token, or a decode's row, passes all layers; a context block is read by attention. Both count 1, so that
    neither is free: a bucket with a needlessly large context, or with needless rows, is never as good as a tight one.
    """
    batch, query, context = shape
    return batch * (query + context) if family == PROMPT else batch + context


def propose(view: View, demands: Mapping[str, Demands], most: Mapping[str, int]) -> Lists:
    """The buckets to prepare, those that drafts add among them.

    Raises InputError where `most` buckets do not reach every admissible step.
    """
    if view.merged:
        raise InputError("vllm-gaudi: no lists are planned for merged prefill; leave VLLM_MERGED_PREFILL out")
    return {
        PROMPT: _prompt(view, demands.get(PROMPT, {}), most[PROMPT]),
        DECODE: tuple(sorted(sizes.with_drafts(view, _decode(view, demands.get(DECODE, {}), most[DECODE])))),
    }


def _aligned(number: int, most: int) -> int:
    return min(-(-number // ALIGNED) * ALIGNED, most)


def _check(family: str, needed: int, most: int) -> None:
    if needed > most:
        raise InputError(f"vllm-gaudi: {most} {family} buckets do not reach every admissible step; allow {needed}")


def required_prompts(view: View) -> list[Shape]:
    """The buckets that cover all admissible prompt steps, whatever else is there.

    One sequence with the longest query and the longest context, and for each larger batch, which runs without
    context, the longest query that max_num_batched_tokens admits.
    """
    longest = min(view.longest_prompt, view.tokens)
    ceiling = min(view.tokens, view.model_len)
    context = -(-(view.longest_prompt - 1) // view.block)
    found = [(1, _aligned(longest, ceiling), context)]
    for batch in range(2, min(view.prefill, view.seqs, view.tokens) + 1):
        found.append((batch, min(_aligned(longest, ceiling), view.tokens // batch), 0))
    return [_sliced(view, shape) for shape in found]


def _sliced(view: View, shape: Shape) -> Shape:
    """A prompt bucket without context as a server takes it that slices long prompts: it would leave others out."""
    if not sizes.unsliced(view, shape):
        return shape
    size = view.number("sdpa_slice")
    batch, query, _ = shape
    longer = -(-query // size) * size
    return (batch, longer, 0) if not sizes.refused_prompt(view, (batch, longer, 0)) else (batch, query, 1)


def required_decodes(view: View) -> list[Shape]:
    """The bucket that covers all admissible decode steps, before drafts.

    All sequences with as many blocks as they can have; with contiguous PA as many as the cache has, and without it at
    most three times that, since sequences share cached blocks, which is where the server's own list ends too.
    """
    worst = view.seqs * view.blocks_each
    if view.contiguous:
        return [(view.seqs, 1, min(view.pool, worst) if view.number("mamba_chunk_size") else view.pool)]
    most = worst if view.own["unbounded_decode_blocks"] else min(worst, view.pool * CLAMP)
    return [(view.seqs, 1, max(most, view.seqs))]


def _prompt(view: View, demands: Demands, most: int) -> tuple[Shape, ...]:
    required = required_prompts(view)
    _check(PROMPT, len(required), most)
    _, longest, context = required[0]
    ceiling = min(view.tokens, view.model_len)
    batches = sorted({1, *(shape[0] for shape in demands)})
    queries = thinned(
        _weights((_aligned(shape[1], ceiling), demand) for shape, demand in demands.items()), ROWS, [longest]
    )
    contexts = thinned(_weights((shape[2], demand) for shape, demand in demands.items()), COLUMNS, [0, context])

    def cost(query: int, context: int) -> float | None:
        return work(PROMPT, (1, query, context)) if _accepted_prompt(view, (1, query, context)) else None

    steps = rounded(demands, (batches, queries, contexts))
    alone = {(query, context): number for (batch, query, context), number in steps.items() if batch == 1}
    share = max(1, (most - len(required) + 1) * len(alone) // max(1, len(steps)))
    chosen = [(1, *point) for point in grid(alone, queries, contexts, cost, share)] if alone else []
    candidates = product(batches, queries, contexts)
    allowed = [shape for shape in candidates if _accepted_prompt(view, shape) and (shape[0] == 1 or not shape[2])]
    return _polished(PROMPT, steps, chosen, allowed, required, most)


def _accepted_prompt(view: View, shape: Shape) -> bool:
    return not sizes.refused_prompt(view, shape) and not sizes.unsliced(view, shape)


def _decode(view: View, demands: Demands, most: int) -> set[Shape]:
    """The seeds: with k drafts a step of n · (k + 1) rows is one of n sequences, and each seed makes three buckets.

    With contiguous PA every row reaches the end of the cache: there the runner takes the batch from one look-up, by the
    blocks in use, and the blocks from a second one, by the highest id. Where these end in different rows it runs the
    batch of one with the blocks of the other, a graph that may not be there.
    """
    each = 3 if view.drafts else 1
    _check(DECODE, each, most)
    required = required_decodes(view)
    top = required[0][2]
    merged = _seeded(view, demands, top)
    rows = thinned(_weights((shape[0], demand) for shape, demand in merged.items()), ROWS, [view.seqs])
    columns = thinned(_weights((shape[2], demand) for shape, demand in merged.items()), COLUMNS, [top])

    def cost(batch: int, blocks: int) -> float:
        return work(DECODE, _fitted(view, (batch, 1, blocks)))

    exponential = sizes.decode_ranges(replace(view, own={**view.own, "exponential_bucketing": True}))
    own = [shape for shape in sizes.decode_buckets(view, exponential) if shape[2] <= top]
    rows = sorted({*rows, *(batch for batch, _, _ in own)})
    columns = sorted({*columns, *(blocks for _, _, blocks in own)})
    steps = rounded(merged, (rows, [1], columns))
    weight = UNSEEN * sum(steps.values()) / len(own)
    for shape in own if weight else ():
        steps[shape] = steps.get(shape, 0.0) + weight
    counted = {(batch, blocks): number for (batch, _, blocks), number in steps.items()}
    points = grid(counted, rows, columns, cost, most // each, full=view.contiguous)
    if view.contiguous:
        rows = sorted({batch for batch, _ in points})
        required = [_fitted(view, (batch, 1, top)) for batch in rows]
    chosen = [_fitted(view, (batch, 1, blocks)) for batch, blocks in points]
    candidates = [_fitted(view, (batch, 1, blocks)) for batch in rows for blocks in columns]
    return set(_polished(DECODE, steps, chosen, candidates, required, most // each))


def _seeded(view: View, demands: Demands, top: int) -> Demands:
    """Steps of sequences without their drafts, with at most `top` blocks."""
    tokens = 1 + view.drafts
    found: dict[Shape, Demand] = {}
    for shape, demand in demands.items():
        batch = -(-shape[0] // tokens)
        blocks = shape[2] if view.contiguous else max(batch, -(-shape[2] // tokens))
        seed = (min(batch, view.seqs), 1, min(blocks, top))
        known = found.get(seed)
        found[seed] = Demand(DECODE, seed, demand.steps + (known.steps if known else 0), 0)
    return found


def _fitted(view: View, shape: Shape) -> Shape:
    """A decode bucket that the server keeps as it is: at least a block for each sequence, at most max_model_len's."""
    batch, query, blocks = shape
    return sizes.clipped(view, (batch, query, blocks if view.contiguous else max(batch, blocks)))


def _weights(steps: Iterable[tuple[int, Demand]]) -> dict[int, float]:
    found: dict[int, float] = {}
    for value, demand in steps:
        found[value] = found.get(value, 0.0) + demand.steps
    return found


def _polished(
    family: str,
    steps: Mapping[Shape, float],
    chosen: Iterable[Shape],
    candidates: Iterable[Shape],
    required: Iterable[Shape],
    most: int,
) -> tuple[Shape, ...]:
    if not steps:
        return tuple(sorted({*chosen, *required}))
    return tuple(sorted(polish(steps, chosen, candidates, required, most, lambda shape: float(work(family, shape)))))
