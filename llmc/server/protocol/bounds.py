"""How much a body may hold: one table, shown in docs/serving.md and, field by field, in /openapi.json.

A body is bounded in bytes; of a field the characters, items or members are counted before what they are. What goes
beyond is refused with the field, the bound and what was sent. Free-form values (schemas of tools, variables of the
template, extras of messages) have the bound of the whole body inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import GetCoreSchemaHandler
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import CoreSchema, no_info_before_validator_function

from llmc.runtime.engine.sampling.params import MAX_CHOICE, MAX_SOURCE

MAX_IDS = 1 << 18
"""Token ids of a prompt, or of an answer of /tokenize."""
MAX_TEXT = 16 << 20
"""Characters of a prompt, and of the text of a message or a description."""
MAX_NAME = 256
"""Characters of a name: the model, the user, a function, an id of a call."""
MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_PARTS = 1024
"""Parts of one message's content."""
MAX_CALLS = 128
"""Tool calls of one message."""
MAX_TOOLS = 128
MAX_KEYS = 1024
"""Members of a free-form object: a schema, a tool's parameters, the template's variables."""
MAX_STOPS = 64
MAX_STOP = 256
"""Characters of one stop string."""
MAX_BAD_WORDS = 256
MAX_BAD_WORD = 256
"""Characters of one bad word."""
MAX_BIASES = 1024
MAX_STOP_IDS = 1024
MAX_ALLOWED_IDS = 1 << 17
MAX_GRAMMAR = MAX_SOURCE
"""Characters of a schema, a regular expression or a grammar given as text, and of one choice."""
MAX_CHOICES = MAX_CHOICE

_UNITS = {str: "characters", list: "items", dict: "members"}


def reported(value: Any, bound: int) -> str:
    """The message for a text, list or object beyond its bound."""
    unit = next(unit for kind, unit in _UNITS.items() if isinstance(value, kind))
    return f"has {len(value)} {unit}; at most {bound} are taken"


@dataclass(frozen=True)
class AtMost:
    """Annotates a text, a list or an object: its characters, items or members, counted before what they are.

    Of a list's items, the first that is wrong ends the check.
    """

    most: int
    least: int = 0

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: Any = handler(source)
        if schema["type"] not in ("str", "list", "dict"):
            raise TypeError(f"{source} has no length to bound")
        schema["max_length"] = self.most
        if self.least:
            schema["min_length"] = self.least
        if schema["type"] == "str":
            return schema  # type: ignore[no-any-return]
        if schema["type"] == "list":
            schema["fail_fast"] = True
        return no_info_before_validator_function(self._counted, schema)

    def _counted(self, value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > self.most:
            raise PydanticCustomError("bound", "{told}", {"told": reported(value, self.most)})
        return value


Name: TypeAlias = Annotated[str, AtMost(MAX_NAME)]
Text: TypeAlias = Annotated[str, AtMost(MAX_TEXT)]
Key: TypeAlias = Annotated[str, AtMost(MAX_NAME)]
Object: TypeAlias = Annotated[dict[Key, Any], AtMost(MAX_KEYS)]
"""A free-form object."""
