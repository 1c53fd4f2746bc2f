"""Values of a call's arguments that a model wrote as bare text, and Python calls."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

_NAMES = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"), (dict, "object"),
)  # fmt: skip
MAX_REFERENCES = 16
"""Steps of references and alternatives that are followed in a schema."""


def loaded(text: str) -> Any:
    """A JSON text's value, or the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def dumped(value: Any) -> str:
    """A value as JSON text that UTF-8 can encode: lone surrogates are escaped, and NaN and infinity are null."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    except ValueError:
        return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None))
    return text


def kind_of(value: Any) -> str:
    """The JSON schema's name of a value's type."""
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "null")


def kinds(schema: Any, root: Any, depth: int = 0) -> set[str]:
    """The types that a schema allows, of which `root` resolves references; empty if it does not say."""
    if not isinstance(schema, Mapping) or depth > MAX_REFERENCES:
        return set()
    stated = schema.get("type")
    if isinstance(stated, str):
        return {stated}
    if isinstance(stated, list):
        return {kind for kind in stated if isinstance(kind, str)}
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list):
            return set(map(kind_of, values))
    if isinstance(reference := schema.get("$ref"), str):
        return kinds(_resolved(reference, root), root, depth + 1)
    ways = [way for name in ("anyOf", "oneOf", "allOf") for way in schema.get(name) or () if isinstance(way, Mapping)]
    return set().union(*(kinds(way, root, depth + 1) for way in ways))


def followed(schema: Any, root: Any) -> Mapping[str, Any]:
    """The schema that a reference, or a chain of them, leads to; {} if there is none."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            break
        if not isinstance(reference := schema.get("$ref"), str):
            return schema
        schema = _resolved(reference, root)
    return {}


def _resolved(reference: str, root: Any) -> Any:
    found = root
    for step in reference.removeprefix("#").strip("/").split("/") if reference.startswith("#") else ("",):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if step and isinstance(found, Mapping) else found
    return found if reference.startswith("#") else None


def typed(text: str, allowed: set[str], quoted: bool | None) -> Any:
    """The value of an argument that was written as `text`.

    `allowed` are the types of its schema. `quoted`: whether the notation marked it as a text, or None.
    """
    if quoted:
        value = written(text) if allowed and "string" not in allowed else text
        return value if kind_of(value) in _widened(allowed) else text
    value = written(text)
    if "string" in allowed:
        fits = not isinstance(value, str) and kind_of(value) in _widened(allowed)
        return value if fits else text
    return text if isinstance(value, str) else value


def _widened(allowed: set[str]) -> set[str]:
    return allowed | ({"integer"} if "number" in allowed else set())


def written(text: str) -> Any:
    """The value of a literal as JSON or Python writes it, quotes included; other text is itself."""
    stripped = text.strip()
    value = loaded(_NAMES.get(stripped, stripped))
    if isinstance(value, str) and stripped[:1] in ("'", '"', "[", "{", "("):
        for source in (stripped, stripped.replace("\n", "\\n")):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    return json.loads(json.dumps(ast.literal_eval(source)))
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                continue
    return value if not isinstance(value, str) or stripped[:1] == '"' else text


def python_calls(text: str) -> list[tuple[str, list[tuple[str, str]]]] | None:
    """Names of f(a=1), g(), and their arguments as they are written; None for other text."""
    found = []
    for call in _split(text):
        match = re.fullmatch(r"([\w.:/-]+)\((.*)\)", call, re.DOTALL)
        words = [re.fullmatch(r"(\w+)\s*=\s*(.*)", word, re.DOTALL) for word in _split(match[2])] if match else [None]
        if match is None or None in words:
            return None
        found.append((match[1], [(word[1], word[2]) for word in words if word]))
    return found or None


def _split(text: str) -> Iterator[str]:
    """Parts of a text between commas that are outside quotes and brackets."""
    depth, quote, start, skip = 0, "", 0, False
    for index, character in enumerate(text):
        if skip:
            skip = False
        elif quote:
            skip = character == "\\"
            quote = "" if character == quote else quote
        elif character == "," and not depth:
            yield text[start:index].strip()
            start = index + 1
        else:
            quote = character if character in "'\"" else ""
            depth += (character in "[{(") - (character in ")}]")
    if rest := text[start:].strip():
        yield rest
