"""Checked reading of JSON objects: every error names the document and the path of the field."""

from __future__ import annotations

import json
import sys
from typing import NoReturn

from llmc.errors import InputError


class Fields:
    """One JSON object of a document; `path` is its place there, "" for the document itself.

    Each reader raises InputError when the field is missing or of another type; `finish` when there are more.
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
        """The object that `text` holds as JSON."""
        try:
            return cls(json.loads(text), document)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{document}: not valid JSON: {error}") from None

    def path(self, name: str) -> str:
        """Where field `name` of this object is in the document."""
        return f"{self._path}.{name}" if self._path else name

    def names(self) -> list[str]:
        """The fields that are present, sorted."""
        return sorted(self._values)

    def integer(self, name: str) -> int:
        """An integer; true and false are none."""
        value = self._take(name, "an integer")
        if type(value) is not int:
            fail(self.document, self.path(name), "an integer", value)
        return value

    def optional_integer(self, name: str) -> int | None:
        """An integer, or None when the field is absent."""
        return self.integer(name) if name in self._values else None

    def boolean(self, name: str) -> bool:
        """True or false."""
        value = self._take(name, "true or false")
        if not isinstance(value, bool):
            fail(self.document, self.path(name), "true or false", value)
        return value

    def number(self, name: str) -> float:
        """A finite number; true and false are none, and neither are NaN and Infinity."""
        value = self._take(name, "a number")
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            fail(self.document, self.path(name), "a finite number", value)
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A finite number, or None when the field is absent."""
        return self.number(name) if name in self._values else None

    def text(self, name: str) -> str:
        """A string."""
        value = self._take(name, "a string")
        if not isinstance(value, str):
            fail(self.document, self.path(name), "a string", value)
        return value

    def text_or_number(self, name: str) -> str | int | float:
        """A string or a finite number, an integer where JSON has one."""
        if isinstance(self._values.get(name), str):
            return self.text(name)
        return self.integer(name) if type(self._values.get(name)) is int else self.number(name)

    def optional_text(self, name: str) -> str | None:
        """A string, or None when the field is absent."""
        return self.text(name) if name in self._values else None

    def peek(self, name: str) -> object:
        """What a field holds, whatever it is."""
        return self._take(name, "anything")

    def array(self, name: str) -> list[object]:
        """An array, of anything."""
        value = self._take(name, "an array")
        if not isinstance(value, list):
            fail(self.document, self.path(name), "an array", value)
        return value

    def nested(self, name: str) -> Fields:
        """A nested object."""
        return Fields(self._take(name, "an object"), self.document, self.path(name))

    def rest(self) -> dict[str, object]:
        """The fields that nothing has read yet, as JSON holds them, for formats that are open to more."""
        return {name: self._take(name, "anything") for name in self.names() if name not in self._read}

    def finish(self) -> None:
        """Raise InputError, naming it, for a field that nothing has read."""
        for name in self.names():
            if name not in self._read:
                raise InputError(f"{self.document}: field {self.path(name)!r} is unknown; remove it")

    def _take(self, name: str, expected: str) -> object:
        if name not in self._values:
            raise InputError(f"{self.document}: field {self.path(name)!r} is missing; expected {expected}")
        self._read.add(name)
        return self._values[name]


def fail(document: str, path: str, expected: str, found: object) -> NoReturn:
    """Raise InputError for a field that holds something else than `expected`."""
    shown = json.dumps(found)
    if len(shown) > 60:
        shown = shown[:57] + "..."
    raise InputError(f"{document}: field {path!r} must be {expected}, found {shown}")
