"""Plans for models without a cache: buckets of batch × tokens, one-dimensional where each text is a batch.

An encode plan is a `Plan` with only prompt buckets, all without context. Coverage proof: a text of every length up to
`max_model_len` fits a bucket of one text; larger groups may be split.

    plan.json = {"schema", "task": "embed" | "score", "limits", "prompt": [[batch, tokens, 0], …], "provenance"}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.buckets.plan import SCHEMA, Fact, Plan, Provenance, buckets_from, limits_from
from llmc.buckets.strategies import powers_of_two
from llmc.errors import InputError
from llmc.json_fields import Fields

DEFAULT_TOKENS = 16384
"""Tokens of the largest batch, padding included, unless the limits say otherwise."""
LEAST_TOKENS = 16


@dataclass(frozen=True)
class EncodePlan(Plan):
    """A plan of batch × tokens buckets for embedding or scoring texts."""

    task: str = "embed"

    def __post_init__(self) -> None:
        """Raise InputError for buckets that lie outside the limits, or that leave a text without one."""
        object.__setattr__(self, "buckets", tuple(sorted(set(self.buckets))))
        for bucket in self.buckets:
            if bucket.phase != "prompt" or bucket.context:
                raise InputError(f"{bucket}: a plan to {self.task} has only prompt buckets without context")
            if exceeded := self.limits.exceeded_by(bucket):
                raise InputError(f"{bucket}: {exceeded}")
        longest = max((bucket.query for bucket in self.buckets), default=0)
        if longest < self.limits.max_model_len:
            raise InputError(
                f"no bucket for a text of {longest + 1} to {self.limits.max_model_len} tokens; plan a longer one"
            )

    def text(self) -> str:
        """Return the plan as text: each length with its batch sizes."""
        by_length: dict[int, list[str]] = {}
        for bucket in self.buckets:
            by_length.setdefault(bucket.query, []).append(str(bucket.batch))
        lines = [f"{len(self.buckets)} buckets to {self.task}, texts of at most {self.limits.max_model_len} tokens"]
        lines += [f"  {length} tokens: {', '.join(found)} texts" for length, found in sorted(by_length.items())]
        facts = self.provenance.facts
        if "padding" in facts:
            alone, together, longest = (
                f"{float(facts[name]):.1%}" for name in ("padding", "padding_in_batches", "padding_to_the_longest")
            )
            lines.append(
                f"  {facts['texts']} recorded texts, {facts['tokens']} tokens: padding {alone} of what is computed, "
                f"{together} in sorted batches, and {longest} if all were as long as the longest"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        """Return the plan as a JSON object."""
        return {**{k: v for k, v in super().to_dict().items() if k != "decode"}, "task": self.task}

    @classmethod
    def from_json(cls, text: str, source: str = "plan") -> EncodePlan:
        """Parse `text` as a plan. Raises InputError, naming `source` and the field."""
        fields = Fields.parse(text, source)
        if "task" not in fields.names():
            raise InputError(f"{source}: a plan to generate text; plan anew with --task embed or --task score")
        if (schema := fields.integer("schema")) != SCHEMA:
            raise InputError(f"{source}: field 'schema' is {schema}, this version of llmc reads {SCHEMA}; plan anew")
        task, limits = fields.text("task"), limits_from(fields.nested("limits"))
        buckets, provenance = buckets_from(fields, "prompt"), Provenance.from_fields(fields.nested("provenance"))
        fields.finish()
        return cls(limits, tuple(buckets), provenance, task)


def encode_plan(
    task: str, max_length: int, max_num_seqs: int = 32, max_num_batched_tokens: int | None = None,
    tokens: Sequence[int] | None = None,
) -> EncodePlan:  # fmt: skip
    """Create a plan of powers of two of texts and of tokens (LEAST_TOKENS …) within the limits.

    `tokens` replaces the powers of two of tokens. Raises InputError for invalid limits.
    """
    most = max(max_length, max_num_seqs, max_num_batched_tokens or min(DEFAULT_TOKENS, max_num_seqs * max_length))
    limits = Limits(max_length, max_num_seqs, most)
    lengths = list(tokens or powers_of_two.values(min(LEAST_TOKENS, max_length), max_length))
    batches = powers_of_two.values(1, max_num_seqs)
    buckets = [Bucket("prompt", b, t, 0) for b in batches for t in lengths if b * t <= most]
    return EncodePlan(limits, tuple(buckets), Provenance("powers-of-two"), task)


STEP_TOKENS = 768
"""Most tokens of a batch, including padding, where any shape runs. Smaller batches read the weights more often, larger
ones exceed caches and leave processors idle at the end. Measured on two CPUs with bge-small's shape in bf16, sentences
per second, in turns: 512: 998, 640: 1008, 768: 1101, 896: 1059, 1024: 1065."""


@dataclass(frozen=True)
class Batch:
    """`rows`, indices into the given texts, run in a graph of `batch` × `tokens`."""

    rows: tuple[int, ...]
    batch: int
    tokens: int


def batches(lengths: Sequence[int], plan: EncodePlan, exact: bool) -> list[Batch]:
    """Return batches that hold every row once, longest first; within the plan's limits, and its buckets unless `exact`.

    In buckets, a batch holds the rows that need its length; shorter rows fill slots that would otherwise be padding.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    found: list[Batch] = []
    at = 0
    while at < len(order):
        longest = lengths[order[at]]
        if exact:
            tokens = longest
            batch = min(max(1, min(plan.limits.max_num_seqs, STEP_TOKENS // longest)), len(order) - at)
        else:
            tokens = min(b.query for b in plan.buckets if b.query >= longest)
            sizes = sorted(b.batch for b in plan.buckets if b.query == tokens)
            shorter = max((b.query for b in plan.buckets if b.query < tokens), default=0)
            needing = 0
            while needing < sizes[-1] and at + needing < len(order) and lengths[order[at + needing]] > shorter:
                needing += 1
            batch = next(size for size in sizes if size >= needing)
        rows = tuple(order[at : at + batch])
        found.append(Batch(rows, batch, tokens))
        at += len(rows)
    return found


STRATEGY = "traffic"


def traffic_plan(
    task: str, texts: Mapping[int, int], max_length: int, max_num_seqs: int = 32,
    max_num_batched_tokens: int | None = None, max_graphs: int | None = None, facts: Mapping[str, Fact] | None = None,
) -> EncodePlan:  # fmt: skip
    """Create a plan for `texts`, a count for each length in tokens; longer texts count as `max_length`.

    The bucket lengths minimise the padding of these texts, each padded to the next length. This is exact for a given
    number of lengths (optimise/line.py). There are as many lengths as `max_graphs` allows, each with its powers of two
    of texts.

    `max_graphs` defaults to the bucket count of `encode_plan`. The provenance has `facts` and the expected padding.
    Raises InputError where not even one length fits.
    """
    from llmc.buckets.optimise.line import Line

    plain = encode_plan(task, max_length, max_num_seqs, max_num_batched_tokens)
    most = len(plain.buckets) if max_graphs is None else max_graphs
    counts: dict[int, int] = {}
    for tokens, number in texts.items():
        counts[min(tokens, max_length)] = counts.get(min(tokens, max_length), 0) + number
    indices = sorted({*counts, max_length})
    line = Line(
        np.array(indices, np.float64), np.array([counts.get(index, 0) for index in indices], np.float64),
        np.array([index == max_length for index in indices]),
    )  # fmt: skip
    numbers = range(1, max(1, min(len(indices), most)) + 1)
    chosen = ([indices[at] for at in found.tolist()] for found in line.solve(list(numbers)))
    built = [encode_plan(task, max_length, max_num_seqs, max_num_batched_tokens, lengths) for lengths in chosen]
    fitting = [plan for plan in built if len(plan.buckets) <= most]
    if not fitting:
        raise InputError(
            f"--max-graphs {most}: one length alone takes {len(built[0].buckets)}, a bucket for each power of "
            "two of texts; raise it, or lower --max-num-seqs"
        )
    best = fitting[-1]
    expected = {**(facts or {}), **padding(best, counts)}
    return replace(best, provenance=Provenance(STRATEGY, facts=expected))


def padding(plan: EncodePlan, texts: Mapping[int, int]) -> dict[str, Fact]:
    """Return the padding shares of the computed tokens, for a count of texts per length.

    "padding": each text alone in its length; "padding_in_batches": all of them sorted and split into the plan's
    buckets; "padding_to_the_longest": every text padded to the longest of them.
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
