"""Key facts of a cache: those in its tree, those of this host, and how the two compare.

Facts are text. A name is dotted, of printable ASCII. Several values of one name, as in a tree of two ranks, are sorted
and joined with " | ".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple
from urllib.parse import quote

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import canonical_json
from llmc.artifacts.third_party.base import Fact
from llmc.errors import InputError

VERSION = "version."
RESERVED = frozenset({"cache", "tree"})
MAX_FACTS = 4000
MAX_NAME = 240
MAX_VALUE = 400
BETWEEN = " | "
_KEPT = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")


def flatten(name: str, value: object) -> Iterator[Fact]:
    """Yield a JSON value as facts: a member of an object is "NAME.MEMBER".

    A list of plain values is one fact, in JSON; any other list has its items by number.
    """
    if isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for member, inner in value.items():
            yield from flatten(f"{name}.{member}", inner)
    elif isinstance(value, str):
        yield Fact(name, value)
    else:
        yield Fact(name, canonical_json(value).decode())


def merge(facts: Iterable[Fact]) -> dict[str, str]:
    """Return facts by name, sorted; names and values that are too long for a key are cut, with a digest.

    Raises InputError for a reserved name, and for more facts than an entry has room for.
    """
    found: dict[str, set[str]] = {}
    for name, value in facts:
        found.setdefault(fact_name(name), set()).add(value)
        if len(found) > MAX_FACTS:
            raise InputError(f"the cache carries more than {MAX_FACTS} key facts; pack its parts one by one")
    if taken := RESERVED & found.keys():
        raise InputError(f"a fact cannot be called {min(taken)!r}; choose another name")
    return {name: _value(BETWEEN.join(sorted(found[name]))) for name in sorted(found)}


def fact_name(text: str) -> str:
    """Return a name valid in a key: other characters are percent-encoded, a long name is cut."""
    name = quote(text, safe=_KEPT, errors="backslashreplace") or "%"
    return (
        name
        if len(name) <= MAX_NAME
        else f"{name[: MAX_NAME - 20]}~{digest_bytes(name.encode()).removeprefix('sha256:')[:16]}"
    )


def _value(text: str) -> str:
    text = text if text.isprintable() else canonical_json(text).decode()
    return text if len(text) <= MAX_VALUE else digest_bytes(text.encode())


def versions(packages: Sequence[str]) -> Iterator[Fact]:
    """Yield the versions of those distributions that are installed here; none is imported.

    The first is the server's own. Without it the others belong to something else, and none counts.
    """
    from importlib.metadata import PackageNotFoundError, version

    for package in packages:
        try:
            yield Fact(VERSION + package, version(package))
        except PackageNotFoundError:
            if package == packages[0]:
                return


def parse_facts(texts: Iterable[str], flag: str) -> dict[str, str]:
    """Parse texts of the form `NAME=VALUE`. Raises InputError naming the flag."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InputError(f"{flag} {text!r:.100}: write it as NAME=VALUE, as in {flag} version.vllm=0.24.0")
        if found.setdefault(fact_name(name), value) != value:
            raise InputError(f"{flag} gives {name!r:.100} twice, with two values")
    return found


class Mismatch(NamedTuple):
    """A fact that differs between a packed cache and this host; `given` by a flag, otherwise found on this host."""

    name: str
    packed: str
    here: str
    given: bool

    def __str__(self) -> str:
        return f"{self.name} is {self.packed} in the cache, {self.here} {'was expected' if self.given else 'here'}"


class FactComparison(NamedTuple):
    """How a cache's facts compare with this host's: names that match, that differ, and that could not be checked."""

    matching: tuple[str, ...]
    mismatches: tuple[Mismatch, ...]
    unchecked: tuple[str, ...]


def compare(
    packed: Mapping[str, str], must_match: Collection[str], given: Mapping[str, str], found: Mapping[str, str]
) -> FactComparison:
    """Compare a cache's facts with those `given`, and those that `must_match` with the facts `found` here.

    A given or found name may be the end of a fact's name ("tensor_parallel_size" of
    "config.parallel.tensor_parallel_size"). Raises InputError for a given name that the cache does not carry, or that
    fits several.
    """
    expected = {resolve(name, packed): value for name, value in given.items()}
    needed = [name for name in packed if any(fnmatchcase(name, pattern) for pattern in must_match)]
    ends = {name: [end for end in found if f".{name}".endswith(f".{end}")] for name in needed}
    here = {name: found[max(fitting, key=len)] for name, fitting in ends.items() if fitting} | expected
    differing = {name for name, value in here.items() if packed[name] != value}
    return FactComparison(
        tuple(sorted(here.keys() - differing)),
        tuple(Mismatch(name, packed[name], here[name], name in expected) for name in sorted(differing)),
        tuple(sorted(set(needed) - here.keys())),
    )


def resolve(name: str, packed: Mapping[str, str]) -> str:
    """Return the fact that a name, or the end of one, means. Raises InputError."""
    if name in packed:
        return name
    fitting = [known for known in packed if known.endswith("." + name)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise InputError(f"{name!r:.100} fits {', '.join(fitting[:5])}; give more of the name")
    from difflib import get_close_matches

    near = get_close_matches(name, packed, 3, 0.4) or sorted(packed)[:5]
    raise InputError(
        f"the cache carries no fact {name!r:.100}; it has {', '.join(near)} …: `llmc cache show KEY` lists them, and "
        "`llmc cache pack --fact NAME=VALUE` adds one"
    )
