"""From ranges to buckets: the values of each dimension by the three strategies, their products, and the filters.

Rules of vllm_gaudi/extension/bucketing/{exponential,linear,padding_aware}.py, August 2026, at commit 091bbad, with the
decode range of #1122, #1552, #1700 and #1745, which their tests in tests/unit_tests state. Filters and the buckets for
drafts are those of common.py there (generate_buckets, generate_spec_decode_buckets); a prompt's context is bounded
separately since #1362.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, log2
from typing import NamedTuple

import numpy as np

from llmc.buckets.strategies import linear, padding_aware
from llmc.errors import InputError
from llmc.integrations.base import Dropped, Shape
from llmc.integrations.vllm_gaudi.config import CLAMP, PARAMETERS, PROMPT, GaudiView

LONG_CONTEXT = 8192
"""From this max_model_len on, prompt contexts are sized by the largest query."""


class PhaseValues(NamedTuple):
    """The values of a phase's three dimensions, each ascending."""

    batches: list[int]
    queries: list[int]
    contexts: list[int]


def exponential(least: int, step: int, most: int, limit: int, exact_top: bool) -> list[int]:
    """Return `limit` values in geometric steps from `least` to `most`, each rounded up to a multiple of `step`.

    A `least` of 0 or 1 is kept, and the steps begin at `step`; a last value above `most` becomes `most`, and with
    `exact_top` (contiguous PA) the last of the steps is `most` itself. The arithmetic is in floats, like numpy's
    float_power: a power that is a multiple of `step` can come out just above it, and thus one step higher. (1, 2, 64,
    6) has 18 and 34 where the exact rule of strategies/exponential.py has 16 and 32; of 76,680 ranges up to 600, 29
    differ. Raises InputError for a limit below 1, with which the server exits.
    """
    if limit < 1:
        raise InputError(f"vllm-gaudi: the exponential range up to {most} has no value; raise the limit it comes from")
    if limit == 1:
        return [most]
    start = step if least in (0, 1) else least
    found = set()
    for index in range(limit):
        value = start * np.float_power(most / start, (1.0 / float(limit - 1)) * index)
        found.add(most if exact_top and index == limit - 1 else ceil(value / step) * step)
    if least in (0, 1):
        found.add(least)
    values = sorted(found)
    return sorted({*values[:-1], min(values[-1], most)})


def prompt_ranges(view: GaudiView) -> PhaseValues:
    """Return the generated values of prompts. Raises InputError for ranges with which the server exits."""
    return _prompt_exponential(view) if view.strategy == "exp" else _prompt_stepped(view)


def decode_ranges(view: GaudiView) -> PhaseValues:
    """Return the generated values of decodes; with contiguous PA they include the cache's blocks."""
    built = _decode_exponential(view) if view.strategy == "exp" else _decode_stepped(view)
    if view.contiguous and built.contexts[-1] < view.pool:
        built.contexts.append(view.pool)
    return built


def _log2_up(number: int) -> int:
    return (number - 1).bit_length()


def _prompt_exponential(view: GaudiView) -> PhaseValues:
    least = 1 if view.own["prompt_query_min"] == 1 else view.block
    long = view.model_len >= LONG_CONTEXT
    contexts = max(1, (view.model_len - (view.tokens if long else least)) // view.block)
    limit = 2 if contexts == 1 else _log2_up(contexts) + 1
    batch = (1, 2, view.prefill_seqs, _log2_up(view.prefill_seqs) + 1)
    query = (least, view.block, view.tokens, _log2_up(view.tokens))
    context = (0, 1, contexts, limit)
    if view.merged:
        batch = (1, 1, 1, 1)
        query = (least, view.block * 4, *query[2:])
        context = (0, 4, contexts * view.prefill_seqs, limit)
    return PhaseValues(*(exponential(*numbers, view.contiguous) for numbers in (batch, query, context)))


def _decode_exponential(view: GaudiView) -> PhaseValues:
    worst = view.blocks_each * view.seqs
    bounded = view.pool * CLAMP
    if view.contiguous:
        most = min(view.pool, worst)
    else:
        most = worst if view.own["unbounded_decode_blocks"] else min(worst, bounded)
    limit = _log2_up(most) + 1
    if not view.contiguous and most > bounded:
        limit += ceil(log2(most / bounded)) + 1
    batches = exponential(1, 2, view.seqs, _log2_up(view.seqs) + 1, view.contiguous)
    return PhaseValues(batches, [1], exponential(1, view.seqs, most, limit, view.contiguous))


def _numbers(view: GaudiView, phase: str, dimension: str, *defaults: int) -> list[int]:
    """Each number from its variable, or the default; PROMPT_SEQ replaces a missing PROMPT_QUERY."""
    found = []
    for parameter, default in zip(PARAMETERS, defaults, strict=False):
        value = view.own[f"{phase}_{dimension}_{parameter}"]
        if value is None and dimension == "query":
            value = view.own[f"{phase}_seq_{parameter}"]
        found.append(value if isinstance(value, int) else default)
    return found


def _defaults(most: int) -> tuple[int, int]:
    """pad_max and pad_percent of a range up to `most`, where no variable states them."""
    return -(-most // 4), 25


def _values(view: GaudiView, numbers: list[int]) -> list[int]:
    least, step, most, pad_max, pad_percent = numbers
    if view.strategy == "lin":
        return linear.values(least, step, most)
    return padding_aware.values(least, step, most, pad_max, pad_percent)


def _prompt_stepped(view: GaudiView) -> PhaseValues:
    seqs, block = view.prefill_seqs, view.block
    batch = _numbers(view, "prompt", "bs", 1, 1, seqs, *_defaults(seqs))
    query = _numbers(view, "prompt", "query", block, block, view.tokens, *_defaults(view.tokens))
    left = view.model_len - query[0]
    step, contexts = (1, left // block) if view.strategy == "lin" else (2, -(-left // block))
    if view.merged:
        batch[:3] = [1, 1, 1]
        query[1:3] = [query[1] * 4, view.tokens]
        step, contexts = 4, contexts * seqs
    context = _numbers(view, "prompt", "ctx", 0, step, contexts, -(-view.tokens // block), 25)
    return PhaseValues(*(_values(view, numbers) for numbers in (batch, query, context)))


def _decode_stepped(view: GaudiView) -> PhaseValues:
    tokens = view.model_len * view.seqs
    least, step, blocks = 1, 32, tokens // view.block
    if view.strategy == "pad":
        least, step, blocks = view.block, 2, -(-tokens // view.block)
    most = view.pool if view.contiguous else max(blocks, view.block)
    batch = _numbers(view, "decode", "bs", 1, step, view.seqs, *_defaults(view.seqs))
    block = _numbers(view, "decode", "block", least, view.block, most, *_defaults(most))
    return PhaseValues(_values(view, batch), [1], _values(view, _within_pool(view, block)))


def _within_pool(view: GaudiView, numbers: list[int]) -> list[int]:
    """A decode range whose max, with contiguous PA, is at most the cache's blocks, and whose min is below them."""
    least, step, most, *rest = numbers
    if view.contiguous and most > view.pool:
        most = view.pool
    if least > view.pool:
        least = max(1, view.pool - step)
    return [least, step, most, *rest]


MOST_BUCKETS = 1 << 20
"""Most buckets of a phase, far beyond what a server can warm up; bounds memory."""


def prompt_buckets(view: GaudiView, ranges: PhaseValues) -> set[Shape]:
    """Return the generated prompt buckets: the product, filtered.

    From max_model_len 8192 on, the largest context of each query becomes the one with which it fills max_model_len, if
    that is not negative and below VLLM_PROMPT_CTX_BUCKET_MAX. Otherwise the context stays that of the previous query,
    as in the plug-in's loop.
    """
    most = view.own["prompt_ctx_max"]
    chunk = view.number("mamba_chunk_size")
    queries = ranges.queries
    if chunk and view.own["mamba_chunk_size_is_explicit"]:
        queries = [-(-query // chunk) * chunk for query in queries]
    _check_count(ranges)
    found = set()
    for batch in ranges.batches:
        for value in ranges.contexts:
            edge = value == ranges.contexts[-1] and view.model_len >= LONG_CONTEXT
            context = value
            for query in queries:
                filling = (view.model_len - query) // view.block
                if edge and filling >= 0 and (not isinstance(most, int) or filling < most):
                    context = filling
                shape = (batch, query, context)
                if not refused_prompt(view, shape):
                    found.add(shape)
    return {shape for shape in found if not unsliced(view, shape)}


def decode_buckets(view: GaudiView, ranges: PhaseValues) -> set[Shape]:
    """Return the generated decode buckets. The product already contains the neighbours that the plug-in adds."""
    _check_count(ranges)
    product = ((batch, 1, context) for batch in ranges.batches for context in ranges.contexts)
    return {clipped(view, shape) for shape in product if not refused_decode(view, shape)}


def _check_count(ranges: PhaseValues) -> None:
    count = len(ranges.batches) * len(ranges.queries) * len(ranges.contexts)
    if count > MOST_BUCKETS:
        raise InputError(f"vllm-gaudi: its ranges give {count} buckets, more than {MOST_BUCKETS}; raise their steps")


def refused_prompt(view: GaudiView, shape: Shape) -> str:
    """Return the reason why the server drops a prompt bucket, or ""."""
    batch, query, context = shape
    if view.merged:
        seqs = view.prefill_seqs
        most = seqs * ((view.model_len - query // seqs) // view.block)
        return f"context above {most} blocks, the most of {seqs} merged prompts" if context > most else ""
    if context > view.most_context:
        return f"context above {view.most_context} blocks, those of max_model_len {view.model_len}"
    if query > view.model_len:
        return f"query above max_model_len {view.model_len}"
    if batch * query > view.tokens:
        return f"batch * query above max_num_batched_tokens {view.tokens}"
    return ""


def unsliced(view: GaudiView, shape: Shape) -> str:
    """Return why a server that slices long prompts (PT_HPU_SDPA_QKV_SLICE_MODE_FWD) drops a prompt bucket, or ""."""
    _, query, context = shape
    slice_size, threshold = view.number("sdpa_slice"), view.number("sdpa_threshold")
    if view.own["sdpa_slices"] and context == 0 and query >= threshold and query % slice_size:
        return f"query from {threshold} on is not a multiple of PT_HPU_SDPA_BC_FACTOR {slice_size}"
    return ""


def refused_decode(view: GaudiView, shape: Shape) -> str:
    """Return the reason why the server drops a decode bucket, or ""; with contiguous PA it keeps all."""
    batch, _, context = shape
    return "" if view.contiguous or batch <= context else "context below one block for each sequence"


def clipped(view: GaudiView, shape: Shape) -> Shape:
    """Return a decode bucket with at most the blocks that its sequences can have; unchanged with contiguous PA."""
    batch, query, context = shape
    if view.contiguous:
        return shape
    return batch, query, min(context, batch * view.blocks_each)


def drafted(view: GaudiView, shape: Shape) -> set[Shape]:
    """Return the buckets that speculation adds for one decode bucket."""
    batch, query, context = shape
    tokens = 1 + view.drafts
    wide = [(batch * tokens, query, context * tokens)]
    if batch * tokens <= context:
        wide.append((batch * tokens, query, context))
    if view.contiguous:
        return set(wide)
    return {(b, q, min(c, b * view.blocks_each)) for b, q, c in wide}


def with_drafts(view: GaudiView, decode: set[Shape]) -> set[Shape]:
    """Return `decode` plus the buckets that speculation adds, unless some of its buckets already have them."""
    if not view.drafts or expanded(view, _seeds(view, decode)) == decode:
        return decode
    return expanded(view, decode)


def seeds(view: GaudiView, prepared: Iterable[Shape]) -> set[Shape]:
    """Return decode buckets for which the server prepares exactly `prepared`, or `prepared` where there are none."""
    known = set(prepared)
    found = _seeds(view, known)
    return found if expanded(view, found) == known else known


def expanded(view: GaudiView, decode: set[Shape]) -> set[Shape]:
    """Return `decode` plus the buckets that speculation adds for each of them."""
    return decode.union(*(drafted(view, shape) for shape in decode)) if view.drafts else decode


def _seeds(view: GaudiView, prepared: set[Shape]) -> set[Shape]:
    """All of `prepared` whose additions are also there: if any list gives `prepared`, this one does."""
    return {shape for shape in prepared if not view.drafts or drafted(view, shape) <= prepared}


def from_file(view: GaudiView, family: str, shapes: Iterable[Shape]) -> tuple[set[Shape], list[Dropped]]:
    """Return a file's buckets that are kept, clipped, and those that are dropped."""
    left: set[Shape] = set()
    dropped = []
    for shape in shapes:
        if family == PROMPT:
            reason = refused_prompt(view, shape) or unsliced(view, shape)
            kept = shape
        else:
            reason = refused_decode(view, shape)
            kept = clipped(view, shape)
        if reason:
            dropped.append(Dropped(family, shape, reason))
            continue
        if kept != shape:
            blocks = f"{kept[0]} * {view.blocks_each}"
            dropped.append(Dropped(family, shape, f"clipped to {kept[2]} blocks ({blocks} of max_model_len)"))
        left.add(kept)
    return left, dropped
