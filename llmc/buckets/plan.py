"""A plan: every bucket to compile for some limits, and the least-cost bucket for any request.

File format, JSON in UTF-8, keys sorted, no time or host in it, so that equal plans are equal bytes:

    plan       = { "schema": 1, "limits": limits, "prompt": [bucket…], "decode": [bucket…],
                   "provenance": provenance }
    limits     = { "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"
                   [, "max_prompt_len"] [, "contexts": false] }
    bucket     = [ batch, query, context ]       ascending; query is 1 in "decode"; context in tokens
    provenance = { "strategy", "parameters", "origins", "notes" [, "facts"] }      see provenance.py
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from llmc.buckets.bucket import PHASES, Bucket, Phase
from llmc.buckets.coverage import prove
from llmc.buckets.fields import Fields, fail
from llmc.buckets.files import read_text, write_text
from llmc.buckets.limits import Limits
from llmc.buckets.provenance import Provenance
from llmc.buckets.table import LookupTable
from llmc.errors import InputError

SCHEMA = 1
"""Version of the file format; a plan of any other version is refused."""

MAX_BUCKETS = 1 << 18
"""Most buckets of one plan: far beyond what can be compiled, low enough to bound memory."""


@dataclass(frozen=True)
class Plan:
    """Sorted, distinct buckets that lie within `limits`, at least one of each phase.

    Raises InputError when they are not that. Coverage is proven by those who make plans (`make_plan`,
    `load`), not here, so that parts of plans can be built.
    """

    limits: Limits
    buckets: tuple[Bucket, ...]
    provenance: Provenance = field(hash=False)

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.buckets))
        object.__setattr__(self, "buckets", ordered)
        for phase in PHASES:
            if not any(bucket.phase == phase for bucket in ordered):
                raise InputError(f"the plan has no {phase} bucket, so it covers nothing; widen its ranges")
        for bucket, following in pairwise(ordered):
            if bucket == following:
                raise InputError(f"the plan has {bucket} twice")
        for bucket in ordered:
            exceeded = self.limits.exceeded_by(bucket)
            if exceeded:
                raise InputError(f"{bucket}: {exceeded}")

    @cached_property
    def prompt(self) -> tuple[Bucket, ...]:
        """The prompt buckets, ascending by batch, query, context."""
        return tuple(bucket for bucket in self.buckets if bucket.phase == "prompt")

    @cached_property
    def decode(self) -> tuple[Bucket, ...]:
        """The decode buckets, ascending by batch, context."""
        return tuple(bucket for bucket in self.buckets if bucket.phase == "decode")

    @cached_property
    def prompt_reach(self) -> tuple[tuple[int, int], ...]:
        """(context, query) of the prompt buckets that no other exceeds in both, ascending by context.

        After `past` cached tokens, one run takes at most the query of the first pair whose context is that
        large. Where graphs read no cached tokens, the largest query always.
        """
        if not self.limits.contexts:
            return ((self.limits.max_model_len, max(bucket.query for bucket in self.prompt)),)
        reach: list[tuple[int, int]] = []
        for context, query in sorted({(bucket.context, bucket.query) for bucket in self.prompt}, reverse=True):
            if not reach or query > reach[-1][1]:
                reach.append((context, query))
        return tuple(reversed(reach))

    @cached_property
    def _tables(self) -> dict[Phase, LookupTable]:
        return {"prompt": LookupTable(self.prompt), "decode": LookupTable(self.decode)}

    def lookup(self, phase: Phase, batch: int, query: int, context: int) -> Bucket | None:
        """The bucket of least `cost` that covers the request, or None; never one that is smaller anywhere.

        `batch` sequences of at most `query` new tokens (decode: 1) and `context` cached tokens each. Takes
        O(log n), about a microsecond; the first call builds the index.
        """
        return self._tables[phase].find(batch, query, self.limits.read(context))

    def digest(self) -> str:
        """SHA-256 of `to_json`, in hexadecimal: equal for equal plans, on every host."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_dict(self) -> dict[str, object]:
        """The plan as JSON holds it."""
        return {
            "schema": SCHEMA,
            "limits": self.limits.to_dict(),
            "prompt": [[bucket.batch, bucket.query, bucket.context] for bucket in self.prompt],
            "decode": [[bucket.batch, bucket.query, bucket.context] for bucket in self.decode],
            "provenance": self.provenance.to_dict(),
        }

    def to_json(self) -> str:
        """The canonical text: one line for each field of the plan, ending in a newline."""
        fields = self.to_dict()
        lines = (f"{json.dumps(name)}: {json.dumps(fields[name], sort_keys=True)}" for name in sorted(fields))
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def _repr_html_(self) -> str:
        """What a notebook shows: the limits, and which graphs there are."""
        from llmc.buckets.pages.grid import grids
        from llmc.buckets.pages.render import fragment

        limits = ", ".join(f"{name} {value:,}" for name, value in self.limits.to_dict().items())
        title = f"A plan of {len(self.buckets):,} graphs ({self.provenance.strategy})"
        return fragment(title, (limits, f"digest {self.digest()[:12]}"), grids(self.prompt, self.decode))

    @classmethod
    def from_json(cls, text: str, source: str = "plan") -> Plan:
        """The plan that `text` holds; `source` names it in messages.

        Raises InputError, naming `source` and the field, for text that is not such a plan, and for a plan
        that leaves an admissible request uncovered.
        """
        fields = Fields.parse(text, source)
        schema = fields.integer("schema")
        if schema != SCHEMA:
            raise InputError(f"{source}: field 'schema' is {schema}, this version of llmc reads {SCHEMA}; plan anew")
        if "task" in fields.names():
            raise InputError(
                f"{source}: a plan to {fields.text('task')}, which generates nothing and is replayed on no traffic; "
                "look at it with llmc plan show"
            )
        limits = limits_from(fields.nested("limits"))
        buckets = [bucket for phase in PHASES for bucket in buckets_from(fields, phase)]
        provenance = Provenance.from_fields(fields.nested("provenance"))
        fields.finish()
        try:
            plan = cls(limits, tuple(buckets), provenance)
        except InputError as error:
            raise InputError(f"{source}: {error}") from None
        missing = prove(plan.limits, plan.buckets)
        if missing:
            raise InputError(
                f"{source}: no bucket for {missing[0]}; restore what was removed from "
                f"field {missing[0].phase!r}, lower 'limits', or plan anew"
            )
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to `path`, all of it or nothing. Raises InputError when it cannot be written."""
        write_text(path, self.to_json(), "plan")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan in file `path`. Raises InputError as `from_json` does, and when it cannot be read."""
        return cls.from_json(read_text(path, "plan"), os.fspath(path))


def limits_from(fields: Fields) -> Limits:
    """The limits that a JSON object holds. Raises InputError naming the field."""
    contexts = "contexts" not in fields.names() or fields.boolean("contexts")
    values = (
        fields.integer("max_model_len"),
        fields.integer("max_num_seqs"),
        fields.integer("max_num_batched_tokens"),
        fields.integer("block_size"),
        fields.optional_integer("max_prompt_len"),
    )
    fields.finish()
    try:
        return Limits(*values).reading(contexts)
    except InputError as error:
        raise InputError(f"{fields.document}: field 'limits': {error}") from None


def buckets_from(fields: Fields, phase: Phase) -> list[Bucket]:
    """The buckets of one phase that a JSON object holds. Raises InputError naming the field."""
    rows = fields.array(phase)
    if len(rows) > MAX_BUCKETS:
        raise InputError(f"{fields.document}: field {phase!r} has {len(rows)} buckets, more than {MAX_BUCKETS}")
    buckets = []
    for index, row in enumerate(rows):
        path = f"{phase}[{index}]"
        if not isinstance(row, list) or len(row) != 3:
            fail(fields.document, path, "[batch, query, context]", row)
        try:
            buckets.append(Bucket(phase, *row))
        except InputError as error:
            raise InputError(f"{fields.document}: field {path!r}: {error}") from None
    return buckets
