"""The values of each dimension: (min, step, max …) of the three strategies, and what they make of it.

Rules of vllm_gaudi/extension/bucketing/{exponential,linear,padding_aware}.py, August 2026: as summed up at commit
091bbad, with the decode range of #1122, #1552, #1700 and #1745, which their tests in tests/unit_tests state.
"""

from __future__ import annotations

from math import ceil, log2
from typing import NamedTuple

import numpy as np

from llmc.buckets.servers.vllm_gaudi.view import CLAMP, PARAMETERS, View
from llmc.buckets.strategies import linear, padding_aware
from llmc.errors import InputError

LONG_CONTEXT = 8192
"""From this max_model_len on, prompt contexts are sized by the largest query."""


class Ranges(NamedTuple):
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
    for place in range(limit):
        value = start * np.float_power(most / start, (1.0 / float(limit - 1)) * place)
        found.add(most if exact_top and place == limit - 1 else ceil(value / step) * step)
    if least in (0, 1):
        found.add(least)
    values = sorted(found)
    return sorted({*values[:-1], min(values[-1], most)})


def prompt(view: View) -> Ranges:
    """The generated values of prompts. Raises InputError for ranges that end the server."""
    return {"exp": _prompt_exponential, "lin": _prompt_linear, "pad": _prompt_padding_aware}[view.strategy](view)


def decode(view: View) -> Ranges:
    """The generated values of decodes; with contiguous PA the cache's blocks are one of them."""
    made = {"exp": _decode_exponential, "lin": _decode_linear, "pad": _decode_padding_aware}[view.strategy](view)
    if view.contiguous and made.contexts[-1] < view.pool:
        made.contexts.append(view.pool)
    return made


def _log2_up(number: int) -> int:
    """ceil(log2 number), for a number of at least 1."""
    return (number - 1).bit_length()


def _prompt_exponential(view: View) -> Ranges:
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
    return Ranges(*(exponential(*numbers, view.contiguous) for numbers in (batch, query, context)))


def _decode_exponential(view: View) -> Ranges:
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
    return Ranges(batches, [1], exponential(1, view.seqs, most, limit, view.contiguous))


def _numbers(view: View, phase: str, dimension: str, *defaults: int) -> list[int]:
    """Each number from its variable, else the default; PROMPT_SEQ stands in for PROMPT_QUERY."""
    found = []
    for parameter, default in zip(PARAMETERS, defaults, strict=False):
        value = view.own[f"{phase}_{dimension}_{parameter}"]
        if value is None and dimension == "query":
            value = view.own[f"{phase}_seq_{parameter}"]
        found.append(value if isinstance(value, int) else default)
    return found


def _prompt_linear(view: View) -> Ranges:
    batch = _numbers(view, "prompt", "bs", 1, 1, view.prefill_seqs)
    query = _numbers(view, "prompt", "query", view.block, view.block, view.tokens)
    contexts = (view.model_len - query[0]) // view.block
    context = _numbers(view, "prompt", "ctx", 0, 1, contexts)
    if view.merged:
        batch = [1, 1, 1]
        query = [query[0], query[1] * 4, view.tokens]
        context = _numbers(view, "prompt", "ctx", 0, 4, contexts * view.prefill_seqs)
    return Ranges(*(_linear(numbers) for numbers in (batch, query, context)))


def _linear(numbers: list[int]) -> list[int]:
    least, step, most = numbers
    return linear.values(least, step, most)


def _decode_linear(view: View) -> Ranges:
    batch = _numbers(view, "decode", "bs", 1, 32, view.seqs)
    most = view.pool if view.contiguous else max(view.model_len * view.seqs // view.block, view.block)
    block = _within_pool(view, _numbers(view, "decode", "block", 1, view.block, most))
    return Ranges(_linear(batch), [1], _linear(block))


def _prompt_padding_aware(view: View) -> Ranges:
    seqs, block = view.prefill_seqs, view.block
    batch = _numbers(view, "prompt", "bs", 1, 1, seqs, -(-seqs // 4), 25)
    query = _numbers(view, "prompt", "query", block, block, view.tokens, -(-view.tokens // 4), 25)
    contexts = -(-(view.model_len - query[0]) // block)
    pad = -(-view.tokens // block)
    context = _numbers(view, "prompt", "ctx", 0, 2, contexts, pad, 25)
    if view.merged:
        batch = [1, 1, 1, *batch[3:]]
        query = [query[0], query[1] * 4, view.tokens, *query[3:]]
        context = _numbers(view, "prompt", "ctx", 0, 4, contexts * seqs, pad, 25)
    return Ranges(*(_padding_aware(numbers) for numbers in (batch, query, context)))


def _decode_padding_aware(view: View) -> Ranges:
    batch = _numbers(view, "decode", "bs", 1, 2, view.seqs, -(-view.seqs // 4), 25)
    most = view.pool if view.contiguous else max(-(-view.model_len * view.seqs // view.block), view.block)
    block = _numbers(view, "decode", "block", view.block, view.block, most, -(-most // 4), 25)
    return Ranges(_padding_aware(batch), [1], _padding_aware(_within_pool(view, block)))


def _padding_aware(numbers: list[int]) -> list[int]:
    least, step, most, pad_max, pad_percent = numbers
    return padding_aware.values(least, step, most, pad_max, pad_percent)


def _within_pool(view: View, numbers: list[int]) -> list[int]:
    """A decode range, its max at most the cache's blocks with contiguous PA, and its min below them."""
    least, step, most, *rest = numbers
    if view.contiguous and most > view.pool:
        most = view.pool
    if least > view.pool:
        least = max(1, view.pool - step)
    return [least, step, most, *rest]
