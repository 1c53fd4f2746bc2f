"""From ranges to buckets: the values of each dimension by the three strategies, their products, and what filters leave.

Rules of vllm_gaudi/extension/bucketing/{exponential,linear,padding_aware}.py, August 2026: as summed up at commit
091bbad, with the decode range of #1122, #1552, #1700 and #1745, which their tests in tests/unit_tests state. Filters
and the buckets that drafts add are those of common.py there (generate_buckets, generate_spec_decode_buckets); a
prompt's context is bounded by itself since #1362.
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
    """`limit` values in geometric steps from `least` to `most`, each rounded up to a multiple of `step`.

    A `least` of 0 or 1 is kept, and the steps begin at `step`; a last value above `most` becomes `most`, and with
    `exact_top` (contiguous PA) the last of the steps is `most` itself. In floats, as numpy's float_power gives them: a
    power that is a multiple of `step` can come out just above it, and so one step higher. (1, 2, 64, 6) has 18 and 34
    where the exact rule of strategies/exponential.py has 16 and 32; of 76,680 ranges up to 600, 29 differ.
    Raises InputError for a limit below 1, which ends the server.
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
    """The generated values of prompts. Raises InputError for ranges that end the server."""
    return _prompt_exponential(view) if view.strategy == "exp" else _prompt_stepped(view)


def decode_ranges(view: GaudiView) -> PhaseValues:
    """The generated values of decodes; with contiguous PA the cache's blocks are one of them."""
    built = _decode_exponential(view) if view.strategy == "exp" else _decode_stepped(view)
    if view.contiguous and built.contexts[-1] < view.pool:
        built.contexts.append(view.pool)
    return built


def _log2_up(number: int) -> int:
    """ceil(log2 number), for a number of at least 1."""
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
    """Each number from its variable, else the default; PROMPT_SEQ stands in for PROMPT_QUERY."""
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
    """The linear or padding-aware values of (min, step, max, pad_max, pad_percent)."""
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
    """A decode range, its max at most the cache's blocks with contiguous PA, and its min below them."""
    least, step, most, *rest = numbers
    if view.contiguous and most > view.pool:
        most = view.pool
    if least > view.pool:
        least = max(1, view.pool - step)
    return [least, step, most, *rest]


MOST_BUCKETS = 1 << 20
"""Of a phase, far beyond what a server can warm up; it bounds memory."""


def prompt_buckets(view: GaudiView, ranges: PhaseValues) -> set[Shape]:
    """The generated prompt buckets: the product, filtered.

    From max_model_len 8192 on, the largest context of each query becomes the one with which it fills max_model_len, if
    that is not negative and below VLLM_PROMPT_CTX_BUCKET_MAX; where it is not, the context stays what the query before
    had, as it does in the plug-in's loop.
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
    """The generated decode buckets. The plug-in adds each one's neighbours, which the whole product has already."""
    _check_count(ranges)
    product = ((batch, 1, context) for batch in ranges.batches for context in ranges.contexts)
    return {clipped(view, shape) for shape in product if not refused_decode(view, shape)}


def _check_count(ranges: PhaseValues) -> None:
    count = len(ranges.batches) * len(ranges.queries) * len(ranges.contexts)
    if count > MOST_BUCKETS:
        raise InputError(f"vllm-gaudi: its ranges make {count} buckets, more than {MOST_BUCKETS}; raise their steps")


def refused_prompt(view: GaudiView, shape: Shape) -> str:
    """Why the server leaves a prompt bucket out, or ""."""
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
    """Why a prompt bucket falls out of a server that slices long prompts (PT_HPU_SDPA_QKV_SLICE_MODE_FWD), or ""."""
    _, query, context = shape
    slice_size, threshold = view.number("sdpa_slice"), view.number("sdpa_threshold")
    if view.own["sdpa_slices"] and context == 0 and query >= threshold and query % slice_size:
        return f"query from {threshold} on is no multiple of PT_HPU_SDPA_BC_FACTOR {slice_size}"
    return ""


def refused_decode(view: GaudiView, shape: Shape) -> str:
    """Why the server leaves a decode bucket out, or ""; with contiguous PA it takes all."""
    batch, _, context = shape
    return "" if view.contiguous or batch <= context else "context below one block for each sequence"


def clipped(view: GaudiView, shape: Shape) -> Shape:
    """A decode bucket with at most as many blocks as its sequences can have; with contiguous PA as it is."""
    batch, query, context = shape
    if view.contiguous:
        return shape
    return batch, query, min(context, batch * view.blocks_each)


def drafted(view: GaudiView, shape: Shape) -> set[Shape]:
    """What speculation adds for one decode bucket."""
    batch, query, context = shape
    tokens = 1 + view.drafts
    wide = [(batch * tokens, query, context * tokens)]
    if batch * tokens <= context:
        wide.append((batch * tokens, query, context))
    if view.contiguous:
        return set(wide)
    return {(b, q, min(c, b * view.blocks_each)) for b, q, c in wide}


def with_drafts(view: GaudiView, decode: set[Shape]) -> set[Shape]:
    """`decode` and what speculation adds; a list that has this for some of its buckets already is whole."""
    if not view.drafts or expanded(view, _seeds(view, decode)) == decode:
        return decode
    return expanded(view, decode)


def seeds(view: GaudiView, prepared: Iterable[Shape]) -> set[Shape]:
    """Decode buckets of which the server prepares just `prepared`, or `prepared` where there are none such."""
    known = set(prepared)
    found = _seeds(view, known)
    return found if expanded(view, found) == known else known


def expanded(view: GaudiView, decode: set[Shape]) -> set[Shape]:
    """`decode` and what speculation adds for each of its buckets."""
    return decode.union(*(drafted(view, shape) for shape in decode)) if view.drafts else decode


def _seeds(view: GaudiView, prepared: set[Shape]) -> set[Shape]:
    """All of `prepared` whose additions are there too: if any list gives `prepared`, this one does."""
    return {shape for shape in prepared if not view.drafts or drafted(view, shape) <= prepared}


def from_file(view: GaudiView, family: str, shapes: Iterable[Shape]) -> tuple[set[Shape], list[Dropped]]:
    """What is left of a file's buckets, clipped, and what is not."""
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
