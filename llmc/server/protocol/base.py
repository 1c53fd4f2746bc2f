"""The base of all request bodies: validation, unknown fields, and limits on their content.

The limits are one table, shown in docs/serving.md and, field by field, in /openapi.json. A body is limited in bytes;
characters, items or members of each field are counted before their types are checked. An error names the field, its
limit and the size sent. Free-form values (tool schemas, template variables, extra message fields) are limited only by
the size of the body.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import CoreSchema, no_info_before_validator_function

from llmc.runtime.engine.sampling.params import MAX_CHOICE, MAX_SOURCE
from llmc.server.errors import ApiError, bad_request

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
    """Limits the characters, items or members of a text, list or object before their types are checked."""

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


_log = logging.getLogger("llmc")
_MAX_NAMES = 256
_unknown: set[str] = set()

Refused = Mapping[str, tuple[Callable[[Any], bool], str]]


class BodyPart(BaseModel):
    """A JSON object inside a body. Types are strict: "1" is not a number. Unknown fields are dropped."""

    model_config = ConfigDict(strict=True, extra="ignore", arbitrary_types_allowed=False, allow_inf_nan=False)


class Body(BodyPart):
    """A request's body.

    `refused` names known fields that are not supported: their harmless values, and why others are refused.
    """

    refused: ClassVar[Refused] = {}

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Validate `data`; raises ApiError 400 that names the field. Unknown fields are ignored and logged once."""
        if not isinstance(data, dict):
            raise bad_request(f"the body must be a JSON object, not {_kind(data)}")
        for name in data.keys() & cls.refused.keys():
            harmless, why = cls.refused[name]
            if data[name] is not None and not harmless(data[name]):
                raise bad_request(f"{name} is not supported: {why}", name, "unsupported_parameter")
        try:
            built = cls.model_validate(data)
        except ValidationError as e:
            raise _explained(e, data) from None
        for name in data.keys() - cls._names():
            _report_unknown(name)
        return built

    @classmethod
    def _names(cls) -> set[str]:
        return {field.alias or name for name, field in cls.model_fields.items()} | cls.refused.keys()


def _report_unknown(name: str) -> None:
    if name not in _unknown and len(_unknown) < _MAX_NAMES:
        _unknown.add(name)
        _log.debug("requests carry the unknown field %.80r, which is ignored", name)


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return "a list" if isinstance(value, list) else "a string" if isinstance(value, str) else "a number"


def _explained(error: ValidationError, data: Any) -> ApiError:
    """Return an error that names the first invalid field and its requirement; size limits come first."""
    errors = error.errors(include_url=False)
    for e in errors:
        if e["type"] in ("bound", "string_too_long"):
            path = _path(e["loc"], data)
            what = e["msg"] if e["type"] == "bound" else reported(e["input"], e["ctx"]["max_length"])
            return bad_request(f"{path} {what}", path)
    found = [(_path(e["loc"], data), e["msg"], e["type"]) for e in errors]
    path, _, kind = found[0]
    if kind == "missing":
        return bad_request(f"{path} is required", path)
    ways = [_should(message) for other, message, _ in found if other == path]
    return bad_request(f"{path} {' or '.join(dict.fromkeys(ways))}", path)


def _should(message: str) -> str:
    for start in ("Input ", "Value error, ", "String ", "List "):
        message = message.removeprefix(start)
    return message[:300]


def _path(loc: Sequence[int | str], data: Any) -> str:
    """Return the location in `data`, without pydantic's tags for union branches."""
    parts = ""
    for index, part in enumerate(loc):
        if isinstance(data, dict) and isinstance(part, str) and (part in data or index == len(loc) - 1):
            if part not in data and parts and not _missing(part):
                continue
            parts += f".{part}" if parts else part
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            parts += f"[{part}]"
            data = data[part]
    return parts


def _missing(part: str) -> bool:
    return part.isidentifier() and part not in {"str", "int", "float", "bool", "dict", "list", "none"}
