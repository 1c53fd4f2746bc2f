"""From values to buckets: the products, the filters for them and for a file's, and the buckets that drafts add.

Rules of vllm_gaudi/extension/bucketing/common.py (generate_buckets, generate_spec_decode_buckets), August 2026: as
summed up at commit 091bbad; a prompt's context is bounded by itself since #1362.
"""

from __future__ import annotations

from collections.abc import Iterable

from llmc.buckets.servers.base import Dropped, Shape
from llmc.buckets.servers.vllm_gaudi.ranges import LONG_CONTEXT, Ranges
from llmc.buckets.servers.vllm_gaudi.view import View
from llmc.errors import InputError

PROMPT, DECODE = "prompt", "decode"

MOST_BUCKETS = 1 << 20
"""Of a phase, far beyond what a server can warm up; it bounds memory."""


def prompts(view: View, ranges: Ranges) -> set[Shape]:
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


def decodes(view: View, ranges: Ranges) -> set[Shape]:
    """The generated decode buckets. The plug-in adds each one's neighbours, which the whole product has already."""
    _check_count(ranges)
    product = ((batch, 1, context) for batch in ranges.batches for context in ranges.contexts)
    return {clipped(view, shape) for shape in product if not refused_decode(view, shape)}


def _check_count(ranges: Ranges) -> None:
    count = len(ranges.batches) * len(ranges.queries) * len(ranges.contexts)
    if count > MOST_BUCKETS:
        raise InputError(f"vllm-gaudi: its ranges make {count} buckets, more than {MOST_BUCKETS}; raise their steps")


def refused_prompt(view: View, shape: Shape) -> str:
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


def unsliced(view: View, shape: Shape) -> str:
    """Why a prompt bucket falls out of a server that slices long prompts (PT_HPU_SDPA_QKV_SLICE_MODE_FWD), or ""."""
    _, query, context = shape
    slice_size, threshold = view.number("sdpa_slice"), view.number("sdpa_threshold")
    if view.own["sdpa_slices"] and context == 0 and query >= threshold and query % slice_size:
        return f"query from {threshold} on is no multiple of PT_HPU_SDPA_BC_FACTOR {slice_size}"
    return ""


def refused_decode(view: View, shape: Shape) -> str:
    """Why the server leaves a decode bucket out, or ""; with contiguous PA it takes all."""
    batch, _, context = shape
    return "" if view.contiguous or batch <= context else "context below one block for each sequence"


def clipped(view: View, shape: Shape) -> Shape:
    """A decode bucket with at most as many blocks as its sequences can have; with contiguous PA as it is."""
    batch, query, context = shape
    if view.contiguous and not view.number("mamba_chunk_size"):
        return shape
    return batch, query, min(context, batch * view.blocks_each)


def drafted(view: View, shape: Shape) -> set[Shape]:
    """What speculation adds for one decode bucket."""
    batch, query, context = shape
    tokens = 1 + view.drafts
    wide = [(batch * tokens, query, context * tokens)]
    if batch * tokens <= context:
        wide.append((batch * tokens, query, context))
    if view.contiguous:
        return set(wide)
    return {(b, q, min(c, b * view.blocks_each)) for b, q, c in wide}


def with_drafts(view: View, decode: set[Shape]) -> set[Shape]:
    """`decode` and what speculation adds; a list that has this for some of its buckets already is whole."""
    if not view.drafts or expanded(view, _seeds(view, decode)) == decode:
        return decode
    return expanded(view, decode)


def seeds(view: View, prepared: Iterable[Shape]) -> set[Shape]:
    """Decode buckets of which the server prepares just `prepared`, or `prepared` where there are none such."""
    known = set(prepared)
    found = _seeds(view, known)
    return found if expanded(view, found) == known else known


def expanded(view: View, decode: set[Shape]) -> set[Shape]:
    """`decode` and what speculation adds for each of its buckets."""
    return decode.union(*(drafted(view, shape) for shape in decode)) if view.drafts else decode


def _seeds(view: View, prepared: set[Shape]) -> set[Shape]:
    """All of `prepared` whose additions are there too: if any list gives `prepared`, this one does."""
    return {shape for shape in prepared if not view.drafts or drafted(view, shape) <= prepared}


def from_file(view: View, family: str, shapes: Iterable[Shape]) -> tuple[set[Shape], list[Dropped]]:
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
