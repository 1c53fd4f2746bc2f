"""The form of a text as a request states it; guided.py makes a constraint of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.errors import InputError
from llmc.runtime.engine.sampling import checks

KINDS = ("json", "regex", "choice", "grammar", "json_object")
MAX_CHOICE = 4096
"""Texts that `choice` may name."""
MAX_SOURCE = 256 << 10
"""Characters that a schema, expression or grammar may have; those of all texts together, for a choice."""


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form a text must have: exactly one of the fields, with vLLM's names.

    Raises InputError for none or several of them, and for one that is not of its type. Whether a schema, a regular
    expression or a grammar can be followed is found out when it is compiled.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or parsed; kept as text."""
    regex: str | None = None
    """A regular expression that the whole text matches (the Rust regex crate's syntax)."""
    choice: Sequence[str] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """A grammar in llguidance's dialect of Lark, whose first rule is `start`."""
    json_object: bool | None = None
    """Any JSON object."""

    def __post_init__(self) -> None:
        if self.json_object is not None:
            checks.boolean("json_object", self.json_object)
        given = self._given()
        if len(given) != 1:
            raise InputError(
                f"structured_outputs takes exactly one of {', '.join(KINDS)}; it has {' and '.join(given) or 'none'}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _unicode(name, getattr(self, name))
        if self.choice is not None:
            choice = checks.texts("structured_outputs.choice", checks.listed("structured_outputs.choice", self.choice))
            if not 1 <= len(choice) <= MAX_CHOICE:
                raise InputError(f"structured_outputs.choice must name 1 to {MAX_CHOICE} texts, not {len(choice)}")
            for text in choice:
                _unicode("choice", text)
            object.__setattr__(self, "choice", choice)

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return self._given()[0]

    def _given(self) -> list[str]:
        return [name for name in KINDS if getattr(self, name) is not None and getattr(self, name) is not False]


GuidedDecodingParams = StructuredOutputsParams
"""vLLM's older name."""


def _unicode(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise InputError(f"structured_outputs.{name} must be a text, not {value!r:.80}")
    if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        raise InputError(f"structured_outputs.{name} holds a lone surrogate: not Unicode")


def _schema(value: Any) -> str:
    """The schema as canonical text, so that equal schemas are compiled once."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else dict(value)
        if not isinstance(parsed, dict):
            raise TypeError(f"a JSON schema is an object, not {parsed!r:.40}")
        return json.dumps(parsed, allow_nan=False)
    except RecursionError:
        raise InputError("structured_outputs.json is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise InputError(f"structured_outputs.json is no JSON schema: {error!s:.200}") from None
