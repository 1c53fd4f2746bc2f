"""Plans for models without a cache: buckets of batch × tokens, one-dimensional where one text is a batch.

A plan is a `Plan` whose buckets are prompt buckets without context, and none of decode. Proof of coverage: a text of
every length up to `max_model_len` fits the bucket of one text and so many tokens; larger groups may be cut.

    plan.json = {"schema", "task": "embed" | "score", "limits", "prompt": [[batch, tokens, 0], …], "provenance"}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmc.buckets.bucket import Bucket
from llmc.buckets.fields import Fields
from llmc.buckets.limits import Limits
from llmc.buckets.plan import SCHEMA, Plan, buckets_from, limits_from
from llmc.buckets.provenance import Provenance
from llmc.buckets.strategies import powers_of_two
from llmc.errors import InputError

DEFAULT_TOKENS = 16384
"""Tokens of the largest batch, padding included, unless the limits say otherwise."""
LEAST_TOKENS = 16


@dataclass(frozen=True)
class EncodePlan(Plan):
    """See the module's docstring."""

    task: str = "embed"

    def __post_init__(self) -> None:
        """Raise InputError for buckets that lie outside the limits, or that leave a text without one."""
        object.__setattr__(self, "buckets", tuple(sorted(set(self.buckets))))
        for bucket in self.buckets:
            if bucket.phase != "prompt" or bucket.context:
                raise InputError(f"{bucket}: a plan to {self.task} has prompt buckets without context alone")
            if exceeded := self.limits.exceeded_by(bucket):
                raise InputError(f"{bucket}: {exceeded}")
        longest = max((bucket.query for bucket in self.buckets), default=0)
        if longest < self.limits.max_model_len:
            raise InputError(
                f"no bucket for a text of {longest + 1} to {self.limits.max_model_len} tokens; plan a longer one"
            )

    def text(self) -> str:
        """For people: each length with its numbers of texts."""
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
        """As JSON holds it."""
        return {**{k: v for k, v in super().to_dict().items() if k != "decode"}, "task": self.task}

    @classmethod
    def from_json(cls, text: str, source: str = "plan") -> EncodePlan:
        """The plan that `text` holds; raises InputError, naming `source` and the field."""
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
    """Powers of two of texts and of tokens (LEAST_TOKENS …), within the limits; `tokens` in place of the latter.

    Raises InputError for limits that are no limits.
    """
    most = max(max_length, max_num_seqs, max_num_batched_tokens or min(DEFAULT_TOKENS, max_num_seqs * max_length))
    limits = Limits(max_length, max_num_seqs, most)
    lengths = list(tokens or powers_of_two.values(min(LEAST_TOKENS, max_length), max_length))
    batches = powers_of_two.values(1, max_num_seqs)
    buckets = [Bucket("prompt", b, t, 0) for b in batches for t in lengths if b * t <= most]
    return EncodePlan(limits, tuple(buckets), Provenance("powers-of-two"), task)
