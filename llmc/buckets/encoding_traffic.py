"""Lengths of buckets for texts that were recorded: those that pad them least, and what padding they leave.

Every text has the least length of a bucket that holds it. Exact for a number of lengths (optimise/line.py); there are
as many as `max_graphs` buckets leave room for, each with its powers of two of texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from llmc.buckets.encoding import EncodePlan, encode_plan
from llmc.buckets.encoding_batches import batches
from llmc.buckets.optimise.line import Line
from llmc.buckets.provenance import Fact, Provenance
from llmc.errors import InputError

STRATEGY = "traffic"


def traffic_plan(
    task: str, texts: Mapping[int, int], max_length: int, max_num_seqs: int = 32,
    max_num_batched_tokens: int | None = None, max_graphs: int | None = None, facts: Mapping[str, Fact] | None = None,
) -> EncodePlan:  # fmt: skip
    """A plan for `texts`, numbers of them by tokens; longer ones count as `max_length`.

    At most `max_graphs` buckets, by default as many as powers of two would be. Its provenance has `facts`, and what
    padding is expected. Raises InputError where not even one length has room.
    """
    plain = encode_plan(task, max_length, max_num_seqs, max_num_batched_tokens)
    most = len(plain.buckets) if max_graphs is None else max_graphs
    counts: dict[int, int] = {}
    for tokens, number in texts.items():
        counts[min(tokens, max_length)] = counts.get(min(tokens, max_length), 0) + number
    places = sorted({*counts, max_length})
    line = Line(
        np.array(places, np.float64), np.array([counts.get(place, 0) for place in places], np.float64),
        np.array([place == max_length for place in places]),
    )  # fmt: skip
    numbers = range(1, max(1, min(len(places), most)) + 1)
    chosen = ([places[at] for at in found.tolist()] for found in line.solve(list(numbers)))
    made = [encode_plan(task, max_length, max_num_seqs, max_num_batched_tokens, lengths) for lengths in chosen]
    fitting = [plan for plan in made if len(plan.buckets) <= most]
    if not fitting:
        raise InputError(
            f"--max-graphs {most}: one length alone takes {len(made[0].buckets)}, a bucket for each power of "
            "two of texts; raise it, or lower --max-num-seqs"
        )
    best = fitting[-1]
    expected = {**(facts or {}), **padding(best, counts)}
    return replace(best, provenance=Provenance(STRATEGY, facts=expected))


def padding(plan: EncodePlan, texts: Mapping[int, int]) -> dict[str, Fact]:
    """Shares of what is computed that padding has, for numbers of texts by tokens.

    "padding": each text alone in its length; "padding_in_batches": all of them sorted and cut into the plan's buckets;
    "padding_to_the_longest": all as long as the longest of them.
    """
    lengths = [tokens for tokens, number in texts.items() for _ in range(number)]
    real, steps = {b.query for b in plan.buckets}, batches(lengths, plan, exact=False)
    alone = sum(min(size for size in real if size >= tokens) * number for tokens, number in texts.items())
    together = sum(step.batch * step.tokens for step in steps)
    total = sum(lengths)
    shares = {
        "padding": alone, "padding_in_batches": together, "padding_to_the_longest": max(lengths) * len(lengths),
    }  # fmt: skip
    return {"texts": len(lengths), "tokens": total, **{n: round(1 - total / size, 4) for n, size in shares.items()}}
