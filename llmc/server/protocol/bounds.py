"""Limits on the content of a body: one table, shown in docs/serving.md and, field by field, in /openapi.json.

A body is limited in bytes; characters, items or members of each field are counted before their types are checked. An
error names the field, its limit and the size sent. Free-form values (tool schemas, template variables, extra message
fields) are limited only by the size of the body.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import GetCoreSchemaHandler
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import CoreSchema, no_info_before_validator_function

from llmc.runtime.engine.sampling.params import MAX_CHOICE, MAX_SOURCE

MAX_IDS = 1 << 18
"""Token ids of a prompt, or of a response of /tokenize."""
MAX_TEXT = 16 << 20
"""Characters of a prompt, and of the text of a message or a description."""
MAX_NAME = 256
"""Characters of a name: the model, the user, a function, a call's id."""
MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_PARTS = 1024
"""Parts of one message's content."""
MAX_CALLS = 128
"""Tool calls of one message."""
MAX_TOOLS = 128
MAX_KEYS = 1024
"""Members of a free-form object: a schema, a tool's parameters, template variables."""
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
"""Characters of a schema, regular expression or grammar given as text, and of one choice."""
MAX_CHOICES = MAX_CHOICE

_UNITS = {str: "characters", list: "items", dict: "members"}


def reported(value: Any, bound: int) -> str:
    """Return the error message for a text, list or object beyond its limit."""
    unit = next(unit for kind, unit in _UNITS.items() if isinstance(value, kind))
    return f"has {len(value)} {unit}; at most {bound} are taken"


@dataclass(frozen=True)
class AtMost:
    """Limits the characters, items or members of an annotated text, list or object, before their types are checked.

    Validation of a list stops at the first invalid item.
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
BoundedName: TypeAlias = Annotated[str, AtMost(MAX_NAME)]
Object: TypeAlias = Annotated[dict[BoundedName, Any], AtMost(MAX_KEYS)]
"""A free-form object."""
