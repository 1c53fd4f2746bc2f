"""Keys of compiled results: named components with one digest over them, so that every miss can be explained.

A key's digest is the sha256 of the canonical JSON (sorted names, no spaces, UTF-8) of

    {"components": {name: str | int | bool | null, …}, "kind": kind, "schema": SCHEMA}

Names are dotted ("toolchain.onnxruntime"); the part before the first dot only groups them for display. docs/formats.md
lists the kinds of keys and their components.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from llmc.artifacts.digest import digest_bytes, is_digest, parse

SCHEMA = 1
LOCAL = "local-"
"""Prefix of kinds whose results are valid only on this machine: they are never pushed, exported or fetched."""

Value = str | int | bool | None
SHOWN = 4
"""Number of differences that `describe` lists; it counts the others."""

LONGEST_SHOWN = 40
"""Longest value that `describe` shows, in characters."""

_KIND = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_NAME = re.compile(r"[!-~]{1,256}")


class Absent:
    """The value of a component that one of two compared keys lacks (unlike one that is None)."""

    def __repr__(self) -> str:
        return "(absent)"

    def __reduce__(self) -> str:
        return "ABSENT"


ABSENT: Final = Absent()


class Difference(NamedTuple):
    """One component in which two keys differ."""

    name: str
    mine: Value | Absent
    theirs: Value | Absent


class Key:
    """Identity of a build result: a kind ("executable") and its named components.

    Immutable and hashable; keys are equal exactly when kind and components are (`1`, `True` and `"1"` differ). Raises
    ValueError or TypeError, as programming errors, for a kind that cannot be a folder name, a component name that is
    empty or contains spaces, and a value that is not exactly a str, int, bool or None.
    """

    __slots__ = ("components", "digest", "kind")

    kind: str
    components: Mapping[str, Value]
    digest: str

    def __init__(self, kind: str, components: Mapping[str, Value]) -> None:
        if not is_kind(kind):
            raise ValueError(f"kind of a key must match {_KIND.pattern}: {kind!r:.100}")
        for name, value in components.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ValueError(f"a key component needs a name of printable ASCII without spaces: {name!r:.80}")
            if value is not None and type(value) not in (str, int, bool):
                raise TypeError(
                    f"key component {name!r} is {type(value).__name__}; convert it to str, int, bool or None"
                )
        ordered = {name: components[name] for name in sorted(components)}
        text = canonical_json({"components": ordered, "kind": kind, "schema": SCHEMA})
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "components", MappingProxyType(ordered))
        object.__setattr__(self, "digest", digest_bytes(text))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Key is immutable; create a new one (tried to set {name!r})")

    def __reduce__(self) -> tuple[type[Key], tuple[str, dict[str, Value]]]:
        return Key, (self.kind, dict(self.components))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Key({self.kind!r}, {self.short}, {len(self.components)} components)"

    @property
    def hex(self) -> str:
        """The digest's 64 hex digits."""
        return parse(self.digest)

    @property
    def is_local(self) -> bool:
        """Whether the result is valid only on this machine."""
        return self.kind.startswith(LOCAL)

    @property
    def short(self) -> str:
        """The first 12 hex digits, for logs and tables."""
        return self.hex[:12]

    def explain(self, other: Key) -> list[Difference]:
        """Return the components in which `other` differs, by name; empty exactly when the keys are equal."""
        found = [] if self.kind == other.kind else [Difference("kind", self.kind, other.kind)]
        return [*found, *differences(self.components, other.components)]


def is_kind(text: object) -> bool:
    """Whether `text` can be the kind of a key, which is also a folder name in the store."""
    return isinstance(text, str) and _KIND.fullmatch(text) is not None


def differences(mine: Mapping[str, Value], theirs: Mapping[str, Value]) -> Iterator[Difference]:
    """Yield the names whose values differ in value or type, sorted."""
    for name in sorted({*mine, *theirs}):
        a: Value | Absent = mine.get(name, ABSENT)
        b: Value | Absent = theirs.get(name, ABSENT)
        if type(a) is not type(b) or a != b:
            yield Difference(name, a, b)


def describe(found: Sequence[Difference], most: int = SHOWN) -> str:
    """Describe differences in one short line, as `theirs → mine`.

    Values that people can read come before digests; differences beyond `most` are only counted.
    """
    order = sorted(found, key=lambda item: (is_digest(item.mine) or is_digest(item.theirs), item.name))
    reported = [f"{name}: {_describe_change(name, mine, theirs)}" for name, mine, theirs in order[:most]]
    more = [f"and {len(order) - most} more"] if len(order) > most else []
    return ", ".join(reported + more)


def changed_code(difference: Difference) -> list[str]:
    """Return the modules that differ in a component "code" (format: llmc/compiler/code.py); otherwise empty."""
    name, mine, theirs = difference
    if name != "code" or not isinstance(mine, str) or not isinstance(theirs, str):
        return []
    one, other = set(mine.split()[1:]), set(theirs.split()[1:])
    changed = one ^ other if one and other else set()
    return sorted({word.partition("=")[0] for word in changed})


def _describe_change(name: str, mine: Value | Absent, theirs: Value | Absent) -> str:
    if modules := changed_code(Difference(name, mine, theirs)):
        return _shorten(", ".join(modules))
    if isinstance(mine, str) and isinstance(theirs, str) and " " in mine and " " in theirs:
        here, there = mine.split(), theirs.split()
        changed = [f"-{word}" for word in there if word not in here]
        changed += [f"+{word}" for word in here if word not in there]
        if changed:
            return _shorten(" ".join(changed))
    return f"{_describe_value(theirs)} → {_describe_value(mine)}"


def _describe_value(value: Value | Absent) -> str:
    if isinstance(value, str):
        return parse(value)[:12] if is_digest(value) else _shorten(value)
    return repr(value) if isinstance(value, Absent) else json.dumps(value)


def _shorten(text: str) -> str:
    shown = text if text.isprintable() and text else json.dumps(text)
    return shown if len(shown) <= LONGEST_SHOWN else shown[: LONGEST_SHOWN - 1] + "…"


def canonical_json(value: object) -> bytes:
    """Encode a JSON value canonically: sorted names, no spaces, UTF-8.

    Raises ValueError for NaN, infinities and text that is not Unicode, TypeError for values that JSON lacks.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()
