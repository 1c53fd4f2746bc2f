"""The contract of a third-party compile cache, and its key facts.

Facts are text. A name is dotted, of printable ASCII. Several values of one name, as in a tree of two ranks, are sorted
and joined with " | ".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar, NamedTuple
from urllib.parse import quote

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import canonical_json
from llmc.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from llmc.artifacts.third_party.contents import Tree


class Fact(NamedTuple):
    """A fact that decides whether a server accepts a cache: a dotted name ("env.VLLM_TARGET_DEVICE") and a value."""

    name: str
    value: str


class ImageForm(NamedTuple):
    """How a cache is stored in an OCI image: the folder of its tree, labels of the config, and further files."""

    folder: str
    labels: Mapping[str, str]
    files: Mapping[str, bytes]


class ThirdPartyCache(ABC):
    """The knowledge about one kind of cache. Methods only read names and small text files; they execute nothing.

    Nothing is unpickled either. `looks_like` describes the content of such a tree. `variables` are the environment
    variables that `location` and `here` read. `packages` are the distributions whose versions are recorded when a cache
    is packed, as facts `version.NAME`. The first is the server's own, without which none is recorded. `must_match` are
    patterns (fnmatch) of facts that the server requires: if this host's value is known and differs, a cache is not
    unpacked.
    """

    name: ClassVar[str]
    looks_like: ClassVar[str]
    variables: ClassVar[Collection[str]] = ()
    packages: ClassVar[Sequence[str]] = ()
    must_match: ClassVar[Collection[str]] = ("version.*",)

    def root(self, folder: Path) -> Path:
        """Return the root of the cache that `folder` is, or lies directly in or above."""
        return folder

    def leaves_out(self, path: str) -> bool:
        """Whether a file or folder is not part of the cache: locks, temporary files, the server's other caches."""
        return path.endswith(".lock")

    @abstractmethod
    def unit(self, path: str) -> str:
        """Return the part of the cache that a file belongs to, which the server uses or ignores as a whole.

        If all of its files are below a folder of that name, the folder is installed in one step; otherwise each file
        is, in the order of their paths.
        """

    @abstractmethod
    def entries(self, tree: Tree) -> Iterable[str]:
        """Return the units that are results of the server's compiler; none in a tree that is not this cache."""

    def incomplete(self, tree: Tree) -> Mapping[str, str]:
        """Return units that are torn or half written, and why."""
        return {}

    @abstractmethod
    def facts(self, tree: Tree) -> Iterable[Fact]:
        """Return the key facts that the tree carries. A name may come with several values."""

    def recorded(self, folder: Path) -> Mapping[str, str]:
        """Return key facts that the packed folder shows but no file states; given facts take precedence over them."""
        return {}

    def logged(self, lines: Iterable[str]) -> Iterable[Fact]:
        """Return the server's version and settings, which its cache may hold only as a hash, from its start-up log.

        Raises InputError for a log that does not state them.
        """
        raise InputError(f"no log of {self.name} is read; give facts with --fact")

    def here(self, environment: Mapping[str, str], folder: Path) -> Mapping[str, str]:
        """Return facts of this host for a cache in `folder`, except versions; only those known without its server."""
        return {}

    @abstractmethod
    def location(self, environment: Mapping[str, str]) -> str | None:
        """Return the folder where the server looks; None if the environment does not say.

        Raises InputError if the server would not find, or would delete, a cache there.
        """

    def image(self, tree: Tree, facts: Mapping[str, str], entries: Collection[str]) -> ImageForm:
        """Return how the cache is stored in an OCI image."""
        return ImageForm(f"io.{self.name}.cache", {}, {})


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
