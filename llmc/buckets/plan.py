"""A plan: every bucket to compile for some limits, and the least-cost bucket for any request.

File format: JSON in UTF-8 with sorted keys. It contains no time or host, so equal plans are equal bytes:

    plan       = { "schema": 1, "limits": limits, "prompt": [bucket…], "decode": [bucket…],
                   "provenance": provenance }
    limits     = { "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"
                   [, "max_prompt_len"] [, "contexts": false] }
    bucket     = [ batch, query, context ]       ascending; query is 1 in "decode"; context in tokens
    provenance = { "strategy", "parameters", "origins", "notes" [, "facts"] }      fields of Provenance
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, cast, get_args

from llmc.buckets.bucket import PHASES, Bucket, Phase
from llmc.buckets.coverage import prove
from llmc.buckets.limits import Limits
from llmc.buckets.lookup import BucketSet
from llmc.errors import InputError
from llmc.files import read_text, write_text
from llmc.json_fields import Fields, fail

if TYPE_CHECKING:
    from llmc.buckets.render.page import Grid

NoteKind = Literal["added", "dropped", "warning"]

Fact = str | int | float


@dataclass(frozen=True)
class Note:
    """A change by the planner that its user did not explicitly request.

    `count` is the number of buckets added or dropped, 0 for a warning; `phase` is None where it concerns both.
    """

    kind: NoteKind
    text: str
    phase: Phase | None = None
    count: int = 0

    def __str__(self) -> str:
        if self.kind == "warning":
            return f"warning: {self.text}"
        return f"{self.kind} {self.count} {self.phase} bucket{'' if self.count == 1 else 's'}: {self.text}"

    def to_dict(self) -> dict[str, object]:
        """Return the note as a JSON object."""
        fields: dict[str, object] = {"kind": self.kind, "text": self.text, "count": self.count}
        return fields if self.phase is None else fields | {"phase": self.phase}

    @classmethod
    def from_fields(cls, fields: Fields) -> Note:
        """Parse the output of `to_dict`. Raises InputError naming the field."""
        kind = fields.text("kind")
        if kind not in get_args(NoteKind):
            fail(fields.document, fields.path("kind"), f"one of {', '.join(get_args(NoteKind))}", kind)
        phase = None if kind == "warning" and "phase" not in fields.names() else fields.text("phase")
        if phase is not None and phase not in PHASES:
            fail(fields.document, fields.path("phase"), f"one of {', '.join(PHASES)}", phase)
        note = cls(cast("NoteKind", kind), fields.text("text"), phase, fields.integer("count"))
        fields.finish()
        return note


@dataclass(frozen=True)
class Provenance:
    """The origin of a plan.

    strategy      name in the strategy registry
    parameters    dimension → name → number, for example prompt_batch → max → 8; contexts in tokens
    origins       "prompt_batch.max", "strategy" or a limit's name → "flag", "environment VARIABLE", "default"
                  …
    notes         dropped and added buckets, with reasons
    facts         for a plan chosen by traffic: the input and the expected results, such as "traffic_sha256",
                  "requests", "prompt_padding"; absent from JSON when empty
    """

    strategy: str
    parameters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    facts: Mapping[str, Fact] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """Return the provenance as a JSON object."""
        fields: dict[str, object] = {
            "strategy": self.strategy,
            "parameters": {name: dict(numbers) for name, numbers in self.parameters.items()},
            "origins": dict(self.origins),
            "notes": [note.to_dict() for note in self.notes],
        }
        return fields | ({"facts": dict(self.facts)} if self.facts else {})

    @classmethod
    def from_fields(cls, fields: Fields) -> Provenance:
        """Parse the output of `to_dict`. Raises InputError naming the field."""
        strategy = fields.text("strategy")
        parameters = fields.nested("parameters")
        origins = fields.nested("origins")
        notes = [
            Note.from_fields(Fields(note, fields.document, f"{fields.path('notes')}[{index}]"))
            for index, note in enumerate(fields.array("notes"))
        ]
        facts = fields.nested("facts") if "facts" in fields.names() else None
        fields.finish()
        return cls(
            strategy,
            {name: _integers(parameters.nested(name)) for name in parameters.names()},
            {name: origins.text(name) for name in origins.names()},
            tuple(notes),
            {} if facts is None else {name: facts.text_or_number(name) for name in facts.names()},
        )


def _integers(fields: Fields) -> dict[str, int]:
    return {name: fields.integer(name) for name in fields.names()}


SCHEMA = 1
"""Version of the file format; a plan of any other version is refused."""

MAX_BUCKETS = 1 << 18
"""Most buckets of one plan: far beyond what can be compiled, low enough to bound memory."""


@dataclass(frozen=True)
class Plan(BucketSet):
    """Sorted, distinct buckets that lie within `limits`, at least one of each phase.

    Raises InputError for other buckets. This class does not prove coverage; `make_plan` and `load` do.
    """

    provenance: Provenance = field(hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for phase in PHASES:
            if not any(bucket.phase == phase for bucket in self.buckets):
                raise InputError(f"the plan has no {phase} bucket, so it covers nothing; widen its ranges")
        for bucket, following in pairwise(self.buckets):
            if bucket == following:
                raise InputError(f"the plan has {bucket} twice")
        for bucket in self.buckets:
            exceeded = self.limits.exceeded_by(bucket)
            if exceeded:
                raise InputError(f"{bucket}: {exceeded}")

    def digest(self) -> str:
        """Return the SHA-256 of `to_json` in hexadecimal; equal plans have equal digests on every host."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_dict(self) -> dict[str, object]:
        """Return the plan as a JSON object."""
        return {
            "schema": SCHEMA,
            "limits": self.limits.to_dict(),
            **{phase: [list(bucket.shape) for bucket in self.of(phase)] for phase in PHASES},
            "provenance": self.provenance.to_dict(),
        }

    def to_json(self) -> str:
        """Return the canonical text: one line for each field of the plan, ending in a newline."""
        fields = self.to_dict()
        lines = (f"{json.dumps(name)}: {json.dumps(fields[name], sort_keys=True)}" for name in sorted(fields))
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def _repr_html_(self) -> str:
        from llmc.buckets.render.page import fragment

        limits = ", ".join(f"{name} {value:,}" for name, value in self.limits.to_dict().items())
        title = f"A plan of {len(self.buckets):,} graphs ({self.provenance.strategy})"
        return fragment(title, (limits, f"digest {self.digest()[:12]}"), grids(self.prompt, self.decode))

    @classmethod
    def from_json(cls, text: str, source: str = "plan") -> Plan:
        """Parse `text` as a plan; `source` names it in messages.

        Raises InputError, naming `source` and the field, for invalid text, and for a plan that leaves an admissible
        request uncovered.
        """
        fields = Fields.parse(text, source)
        schema = fields.integer("schema")
        if schema != SCHEMA:
            raise InputError(f"{source}: field 'schema' is {schema}, this version of llmc reads {SCHEMA}; plan anew")
        if "task" in fields.names():
            raise InputError(
                f"{source}: a plan to {fields.text('task')}, which generates no text and cannot be replayed on "
                "traffic; show it with llmc plan show"
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
                f"{source}: no bucket for {missing[0]}; restore the buckets removed from "
                f"field {missing[0].phase!r}, lower 'limits', or plan anew"
            )
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to `path` atomically. Raises InputError when it cannot be written."""
        write_text(path, self.to_json(), "plan")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Load the plan from file `path`. Raises InputError like `from_json`, and when the file cannot be read."""
        return cls.from_json(read_text(path, "plan"), os.fspath(path))


def limits_from(fields: Fields) -> Limits:
    """Parse the limits in a JSON object. Raises InputError naming the field."""
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
    """Parse the buckets of one phase in a JSON object. Raises InputError naming the field."""
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


MOST = 16
"""Most rows and columns of a grid; with more values, neighbours share one."""

DARKEST = 0.85


def grids(prompt: Sequence[Bucket], decode: Sequence[Bucket]) -> list[Grid]:
    """Return a grid of prompt buckets by batch and new tokens, and one of decode buckets by batch and context."""
    return [
        _grid("Prompt graphs", prompt, "new tokens", lambda bucket: bucket.query),
        _grid("Decode graphs", decode, "context", lambda bucket: bucket.context),
    ]


def _grid(heading: str, buckets: Sequence[Bucket], across: str, length: Callable[[Bucket], int]) -> Grid:
    from llmc.buckets.render.page import Grid

    batches = _shared({bucket.batch for bucket in buckets})
    lengths = _shared({length(bucket) for bucket in buckets})
    numbers = [[0] * len(lengths) for _ in batches]
    rows = {value: position for position, values in enumerate(batches) for value in values}
    columns = {value: position for position, values in enumerate(lengths) for value in values}
    for bucket in buckets:
        numbers[rows[bucket.batch]][columns[length(bucket)]] += 1
    most = (batches[-1][-1] * max(1, lengths[-1][-1])) ** 0.5
    shades = [[DARKEST * (some[-1] * max(1, long[-1])) ** 0.5 / most for long in lengths] for some in batches]
    return Grid(
        f"{heading} ({len(buckets):,})", f"batch \\ {across}", _names(lengths), _names(batches), numbers, shades,
        "Number of graphs; darker means more tokens in a step.",
    )  # fmt: skip


def _shared(values: set[int]) -> list[list[int]]:
    """`values` ascending, in at most MOST groups of neighbours."""
    ordered = sorted(values)
    width = -(-len(ordered) // MOST)
    return [ordered[start : start + width] for start in range(0, len(ordered), width)]


def _names(groups: Sequence[Sequence[int]]) -> list[str]:
    return [f"{group[0]:,}" if len(group) == 1 else f"{group[0]:,}–{group[-1]:,}" for group in groups]
