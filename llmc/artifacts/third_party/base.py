"""The contract of a third-party compile cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from llmc.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from llmc.artifacts.third_party.tree import Tree


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
