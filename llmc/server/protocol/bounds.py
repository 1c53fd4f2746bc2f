"""How much a body may hold: one table, shown in docs/serving.md and, field by field, in /openapi.json.

The whole body is counted in its bytes before any of it is read (json_counts.py); a field's list, text or object then,
before what it holds. What goes beyond is refused with the field, the bound and what was sent. Free-form values (schemas
of tools, variables of the template, extras of messages) have the bounds of the whole body inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import GetCoreSchemaHandler, ValidationError, ValidatorFunctionWrapHandler
from pydantic_core import InitErrorDetails, PydanticCustomError
from pydantic_core.core_schema import (
    CoreSchema,
    no_info_before_validator_function,
    no_info_wrap_validator_function,
)

from llmc.runtime.engine.sampling.structured import MAX_CHOICE, MAX_SOURCE

PIECE = 4096
"""Items of a list that are checked at a time."""
MAX_DEPTH = 128
"""Lists and objects inside one another."""
MAX_VALUES = 1 << 18
"""Values in the whole body: elements of lists and objects, and these themselves."""
MAX_CONTAINERS = 1 << 15
"""Lists and objects in the whole body."""
MAX_MEMBERS = 1 << 16
"""Members of objects in the whole body."""
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


def told(value: Any, bound: int) -> str:
    """The message for a text, list or object beyond its bound."""
    unit = next(unit for kind, unit in _UNITS.items() if isinstance(value, kind))
    return f"has {len(value)} {unit}; at most {bound} are taken"


@dataclass(frozen=True)
class AtMost:
    """Annotates a text, a list or an object: its characters, items or members, counted before what they are.

    Of a list's items, the first that is wrong ends the check. A long list is checked PIECE items at a time, because a
    check of all keeps the interpreter to itself: 10 ms for 260,000 numbers.
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
            return no_info_wrap_validator_function(self._in_pieces, schema)
        return no_info_before_validator_function(self._counted, schema)

    def _counted(self, value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > self.most:
            raise PydanticCustomError("bound", "{told}", {"told": told(value, self.most)})
        return value

    def _in_pieces(self, value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        self._counted(value)
        if not isinstance(value, list) or len(value) <= PIECE:
            return check(value)
        made: list[Any] = []
        for start in range(0, len(value), PIECE):
            try:
                made += check(value[start : start + PIECE])
            except ValidationError as error:
                raise _moved(error, start) from None
        return made


def _moved(error: ValidationError, items: int) -> ValidationError:
    """The errors of a piece of a list that begins after so many items."""
    lines: list[InitErrorDetails] = []
    for line in error.errors(include_url=False):
        place, *rest = line["loc"]
        what = PydanticCustomError(line["type"], "{said}", {**line.get("ctx", {}), "said": line["msg"]})
        lines.append({"type": what, "loc": (int(place) + items, *rest), "input": line["input"]})
    return ValidationError.from_exception_data(error.title, lines)


Name: TypeAlias = Annotated[str, AtMost(MAX_NAME)]
Text: TypeAlias = Annotated[str, AtMost(MAX_TEXT)]
Key: TypeAlias = Annotated[str, AtMost(MAX_NAME)]
Object: TypeAlias = Annotated[dict[Key, Any], AtMost(MAX_KEYS)]
"""A free-form object."""
