"""Registries of implementations by name: llmc's own and those of other installed packages.

A package registers its own in an entry-point group (`GROUPS`):

    [project.entry-points."llmc.targets"]
    lpu = "llmc_lpu.target:LpuTarget"

Implementations are imported on first use. llmc's own names take precedence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache, cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

from llmc.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

GROUPS = (
    "llmc.deployments", "llmc.executors", "llmc.integrations", "llmc.strategies", "llmc.targets",
)  # fmt: skip


@cache
def _brought(group: str) -> EntryPoints:
    """Entry points of installed packages in a group. Listing them reads one file per package."""
    from importlib.metadata import entry_points

    return entry_points(group=group)


@cache
def packages() -> frozenset[str]:
    """Top-level packages or modules that other distributions register."""
    return frozenset(point.module.partition(".")[0] for group in GROUPS for point in _brought(group))


class Registry:
    """A registry of one kind of implementation.

    `what` is its name in error messages and `group` its entry-point group. `own` maps names to "module:attribute".
    Names in `untold` work but are not listed; they are for tests. `parts` names a function that returns more entries.
    """

    def __init__(
        self, what: str, group: str = "", own: Mapping[str, str] | None = None, untold: Collection[str] = (),
        parts: str = "",
    ) -> None:  # fmt: skip
        self._what, self._group, self._own, self._untold, self._parts = what, group, own or {}, untold, parts

    @cached_property
    def _others(self) -> dict[str, tuple[str, str]]:
        """Other packages' entries: name → ("module:attribute", distribution). Raises InputError for a duplicate."""
        found: dict[str, tuple[str, str]] = {}
        if self._parts:
            module, _, attribute = self._parts.partition(":")
            found = {name: (location, "") for name, location in getattr(import_module(module), attribute)().items()}
        for point in _brought(self._group) if self._group else ():
            package = point.dist.name if point.dist is not None else point.value
            if point.name in found and found[point.name] != (point.value, package):
                both = " and ".join(sorted({found[point.name][1], package}))
                raise InputError(
                    f"two installed packages provide a {self._what} {point.name!r}, {both}; uninstall one of them"
                )
            found[point.name] = (point.value, package)
        return {name: value for name, value in found.items() if name not in self._own}

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted({*self._own, *self._others})

    def reported(self) -> list[str]:
        """The names listed for people."""
        return [name for name in self.names() if name not in self._untold]

    def location(self, name: str) -> str:
        """The "module:attribute" of a name. Raises UnknownNameError listing the known names."""
        if name in self._own:
            return self._own[name]
        if name in self._others:
            return self._others[name][0]
        raise UnknownNameError(self._what, name, self.reported())

    def module(self, name: str) -> str:
        """The module of a name. Raises UnknownNameError listing the known names."""
        return self.location(name).partition(":")[0]

    def get(self, name: str) -> Any:
        """Import the class of a name. Raises UnknownNameError listing the known names, ModuleNotFoundError if a package
        is missing."""
        module, _, attribute = self.location(name).partition(":")
        return getattr(import_module(module), attribute)
