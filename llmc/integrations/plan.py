"""A server's plan: the graphs of one server in its own units, with the inputs of its rules.

File format: JSON in UTF-8 with sorted keys. It contains no time or host, so equal plans are equal bytes:

    plan     = { "schema": 1, "server": name, "limits": limits, "settings": { name: value… }, "lists": lists,
                 "origin": text, "facts": { name: text or number… } }
    limits   = { "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size" [, "max_prompt_len"] }
    lists    = { family: [ [number…]… ]… }       ascending and distinct
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from llmc.buckets.plan import MAX_BUCKETS, Fact, limits_from
from llmc.errors import InputError
from llmc.files import read_text, write_text
from llmc.integrations import bucket_rules
from llmc.integrations.base import BucketRules, GraphFamily, Lists, Setup, Shape
from llmc.integrations.settings import Value, complete
from llmc.json_fields import Fields, fail

SCHEMA = 1
"""Version of the file format; a plan of any other version is refused."""


@dataclass(frozen=True)
class ServerPlan:
    """The graphs that `server` prepares. `origin` is their source, `facts` the input and the expected results."""

    server: str
    setup: Setup
    lists: Lists
    origin: str
    facts: Mapping[str, Fact] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """Return the plan as a JSON object."""
        return {
            "schema": SCHEMA,
            "server": self.server,
            "limits": self.setup.limits.to_dict(),
            "settings": dict(self.setup.own),
            "lists": {name: [list(shape) for shape in shapes] for name, shapes in self.lists.items()},
            "origin": self.origin,
            "facts": dict(self.facts),
        }

    def to_json(self) -> str:
        """Return the canonical text: one line for each field of the plan, ending in a newline."""
        fields = self.to_dict()
        lines = (f"{json.dumps(name)}: {json.dumps(fields[name], sort_keys=True)}" for name in sorted(fields))
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to `path` atomically. Raises InputError when it cannot be written."""
        write_text(path, self.to_json(), "plan")

    @classmethod
    def from_json(cls, text: str, source: str = "plan") -> ServerPlan:
        """Parse `text` as a plan; `source` names it in messages.

        Raises InputError, naming `source` and the field, for invalid text, and UnknownNameError for an unknown server.
        """
        fields = Fields.parse(text, source)
        schema = fields.integer("schema")
        if schema != SCHEMA:
            raise InputError(f"{source}: field 'schema' is {schema}, this version of llmc reads {SCHEMA}; plan anew")
        server = bucket_rules(fields.text("server"))
        limits = limits_from(fields.nested("limits"))
        try:
            own = complete(server.settings, cast("dict[str, Value]", fields.nested("settings").rest()))
        except InputError as error:
            raise InputError(f"{source}: field 'settings': {error}") from None
        nested = fields.nested("lists")
        lists = {family.name: shapes(nested, family) for family in server.families}
        nested.finish()
        facts = fields.nested("facts")
        plan = cls(
            server.name, Setup(limits, own), lists, fields.text("origin"),
            {name: facts.text_or_number(name) for name in facts.names()},
        )  # fmt: skip
        fields.finish()
        return plan

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ServerPlan:
        """Load the plan from file `path`. Raises InputError like `from_json`, and when it cannot be read."""
        return cls.from_json(read_text(path, "plan"), os.fspath(path))

    def model(self) -> BucketRules:
        """Return the rules of the plan's server."""
        return bucket_rules(self.server)


def shapes(fields: Fields, family: GraphFamily) -> tuple[Shape, ...]:
    """Parse the list of one family. Raises InputError, naming the location, for other than ascending shapes of it."""
    rows = fields.array(family.name)
    if len(rows) > MAX_BUCKETS:
        raise InputError(f"{fields.document}: field {fields.path(family.name)!r} has more than {MAX_BUCKETS} graphs")
    found: list[Shape] = []
    for index, row in enumerate(rows):
        path = f"{fields.path(family.name)}[{index}]"
        good = isinstance(row, list) and len(row) == len(family.axes)
        if not good or not all(type(number) is int and 0 <= number < 1 << 31 for number in cast("list[object]", row)):
            fail(fields.document, path, f"[{', '.join(family.axes)}], whole numbers from 0", row)
        found.append(tuple(cast("list[int]", row)))
        if index and found[-2] >= found[-1]:
            fail(fields.document, path, "above the one before", row)
    return tuple(found)
