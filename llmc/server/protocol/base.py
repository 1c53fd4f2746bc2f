"""The base of all request bodies: validation, and handling of unknown fields."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from llmc.server.errors import ApiError, bad_request
from llmc.server.protocol.bounds import reported

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
