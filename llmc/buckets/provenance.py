"""Why a plan is what it is: its strategy, the origin of each number, and what was changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from llmc.buckets.bucket import PHASES, Phase
from llmc.buckets.fields import Fields, fail

NoteKind = Literal["added", "dropped", "warning"]

Fact = str | int | float


@dataclass(frozen=True)
class Note:
    """A change by the planner that its user did not explicitly ask for.

    `count` is the number of buckets added or dropped, 0 for a warning; `phase` is None where it concerns
    both.
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
        """The note as JSON holds it."""
        fields: dict[str, object] = {"kind": self.kind, "text": self.text, "count": self.count}
        return fields if self.phase is None else fields | {"phase": self.phase}

    @classmethod
    def from_fields(cls, fields: Fields) -> Note:
        """The inverse of `to_dict`; raises InputError naming the field."""
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
    """Where a plan comes from.

    strategy      name in the strategy registry
    parameters    dimension → name → number, for example prompt_batch → max → 8; contexts in tokens
    origins       "prompt_batch.max", "strategy" or a limit's name → "flag", "environment VARIABLE", "default"
                  …
    notes         what was dropped and added, and why
    facts         of a plan chosen by traffic: what was read and what is expected of the plan, such as
                  "traffic_sha256", "requests", "prompt_waste"; absent from JSON when empty
    """

    strategy: str
    parameters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    facts: Mapping[str, Fact] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """The provenance as JSON holds it."""
        fields: dict[str, object] = {
            "strategy": self.strategy,
            "parameters": {name: dict(numbers) for name, numbers in self.parameters.items()},
            "origins": dict(self.origins),
            "notes": [note.to_dict() for note in self.notes],
        }
        return fields | ({"facts": dict(self.facts)} if self.facts else {})

    @classmethod
    def from_fields(cls, fields: Fields) -> Provenance:
        """The inverse of `to_dict`; raises InputError naming the field."""
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
