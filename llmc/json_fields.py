"""Checked reading of JSON objects. Every error names the document and the field's path."""

from __future__ import annotations

import json
import sys
from typing import NoReturn

from llmc.errors import InputError


class Fields:
    """One JSON object in a document. `path` is its location there, "" for the top level.

    Each reader raises InputError if the field is missing or has another type; `finish` raises it for unread fields.
    """

    def __init__(self, value: object, document: str, path: str = "") -> None:
        self.document = document
        self._path = path
        if not isinstance(value, dict):
            fail(document, path or "the document", "an object", value)
        self._values: dict[str, object] = value
        self._read: set[str] = set()

    @classmethod
    def parse(cls, text: str, document: str) -> Fields:
        """Parse the JSON object in `text`."""
        try:
            return cls(json.loads(text), document)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{document}: not valid JSON: {error}") from None

    def path(self, name: str) -> str:
        """The path of field `name` in the document."""
        return f"{self._path}.{name}" if self._path else name

    def names(self) -> list[str]:
        """The names of the fields present, sorted."""
        return sorted(self._values)

    def integer(self, name: str) -> int:
        """Read an integer; true and false are refused."""
        value = self._take(name, "an integer")
        if type(value) is not int:
            fail(self.document, self.path(name), "an integer", value)
        return value

    def optional_integer(self, name: str) -> int | None:
        """Read an integer, or None if the field is absent."""
        return self.integer(name) if name in self._values else None

    def boolean(self, name: str) -> bool:
        """Read true or false."""
        value = self._take(name, "true or false")
        if not isinstance(value, bool):
            fail(self.document, self.path(name), "true or false", value)
        return value

    def number(self, name: str) -> float:
        """Read a finite number; true, false, NaN and Infinity are refused."""
        value = self._take(name, "a number")
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            fail(self.document, self.path(name), "a finite number", value)
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """Read a finite number, or None if the field is absent."""
        return self.number(name) if name in self._values else None

    def text(self, name: str) -> str:
        """Read a string."""
        value = self._take(name, "a string")
        if not isinstance(value, str):
            fail(self.document, self.path(name), "a string", value)
        return value

    def text_or_number(self, name: str) -> str | int | float:
        """Read a string or a finite number; an integer stays an integer."""
        if isinstance(self._values.get(name), str):
            return self.text(name)
        return self.integer(name) if type(self._values.get(name)) is int else self.number(name)

    def optional_text(self, name: str) -> str | None:
        """Read a string, or None if the field is absent."""
        return self.text(name) if name in self._values else None

    def peek(self, name: str) -> object:
        """Read a field of any type."""
        return self._take(name, "anything")

    def array(self, name: str) -> list[object]:
        """Read an array with elements of any type."""
        value = self._take(name, "an array")
        if not isinstance(value, list):
            fail(self.document, self.path(name), "an array", value)
        return value

    def nested(self, name: str) -> Fields:
        """Read a nested object."""
        return Fields(self._take(name, "an object"), self.document, self.path(name))

    def rest(self) -> dict[str, object]:
        """Read all remaining fields, for formats that allow additional ones."""
        return {name: self._take(name, "anything") for name in self.names() if name not in self._read}

    def finish(self) -> None:
        """Raise InputError naming the first field that was not read."""
        for name in self.names():
            if name not in self._read:
                raise InputError(f"{self.document}: field {self.path(name)!r} is unknown; remove it")

    def _take(self, name: str, expected: str) -> object:
        if name not in self._values:
            raise InputError(f"{self.document}: field {self.path(name)!r} is missing; expected {expected}")
        self._read.add(name)
        return self._values[name]


def fail(document: str, path: str, expected: str, found: object) -> NoReturn:
    """Raise InputError for a field whose value is not what was expected."""
    shown = json.dumps(found)
    if len(shown) > 60:
        shown = shown[:57] + "..."
    raise InputError(f"{document}: field {path!r} must be {expected}, found {shown}")
