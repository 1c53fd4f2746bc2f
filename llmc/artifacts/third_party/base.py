"""The contract of another system's compile cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from llmc.artifacts.third_party.tree import Tree


class Fact(NamedTuple):
    """One thing that decides whether a server takes a cache: a dotted name ("env.VLLM_TARGET_DEVICE") and a value."""

    name: str
    value: str


class ImageForm(NamedTuple):
    """How a cache lies in an OCI image: the folder of its tree, labels of the image's config, and further files."""

    folder: str
    labels: Mapping[str, str]
    files: Mapping[str, bytes]


class ThirdPartyCache(ABC):
    """What llmc knows of one cache. Methods read names and small text files; they execute and unpickle nothing.

    `looks_like` says in words what such a tree has. `variables` are those of the environment that `location` and `here`
    read. `packages` are the distributions whose versions are recorded when a cache is packed, as facts `version.NAME`:
    the server's own first, without which none is.
    `must_match` are patterns (fnmatch) of the facts without which the server does not take a cache: where this host's
    value is known and differs, a cache is not unpacked.
    """

    name: ClassVar[str]
    looks_like: ClassVar[str]
    variables: ClassVar[Collection[str]] = ()
    packages: ClassVar[Sequence[str]] = ()
    must_match: ClassVar[Collection[str]] = ("version.*",)

    def root(self, folder: Path) -> Path:
        """The root of the cache that `folder` is, or lies directly in or above."""
        return folder

    def leaves_out(self, path: str) -> bool:
        """Whether a file or folder is none of the cache: locks, temporary files, the server's other caches."""
        return path.endswith(".lock")

    @abstractmethod
    def unit(self, path: str) -> str:
        """The part of the cache that a file belongs to, which the server takes or leaves as a whole.

        If all of its files are below a folder of that name, the folder is put in place in one step; else each file is,
        in the order of their paths.
        """

    @abstractmethod
    def entries(self, tree: Tree) -> Iterable[str]:
        """The units that are results of the server's compiler; none in a tree that is not this cache."""

    def incomplete(self, tree: Tree) -> Mapping[str, str]:
        """Units that are torn or half written, and why."""
        return {}

    @abstractmethod
    def facts(self, tree: Tree) -> Iterable[Fact]:
        """The key facts that the tree carries. A name may come with several values."""

    def recorded(self, folder: Path) -> Mapping[str, str]:
        """Key facts that no file says, and that the folder which is packed does; one that is given wins over them."""
        return {}

    def here(self, environment: Mapping[str, str], folder: Path) -> Mapping[str, str]:
        """Facts of this host for a cache in `folder`, besides versions; only what can be found without its server."""
        return {}

    @abstractmethod
    def location(self, environment: Mapping[str, str]) -> str | None:
        """The folder where the server looks; None where the environment does not say.

        Raises InputError where the server would not find, or would delete, what is put there.
        """

    def image(self, tree: Tree, facts: Mapping[str, str], entries: Collection[str]) -> ImageForm:
        """How the cache lies in an OCI image."""
        return ImageForm(f"io.{self.name}.cache", {}, {})
