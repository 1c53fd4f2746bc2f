"""Integrations with other systems: one package per system, with the parts that it has.

    <system>/__init__.py   INTEGRATION: where the parts are (base.py), each imported on first use
    <system>/buckets.py    sizes, filters, look-up and misses of a server's graphs
    <system>/config.py     its configuration, read and written
    <system>/cache.py      its compile cache
    <system>/logs.py       its request logs and metrics
    <system>/deploy/       templates of its deployment

To add a system, add a package; to remove one, delete its folder. Other packages add theirs in the entry-point group
"llmc.integrations", whose values are `Integration`s. The modules in this folder are shared by several systems.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from typing import TYPE_CHECKING

from llmc.errors import InputError
from llmc.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from llmc.artifacts.third_party.base import ThirdPartyCache
    from llmc.integrations.base import BucketRules, Integration
    from llmc.integrations.settings import Value

_OWN = {
    module.name.replace("_", "-"): f"{__name__}.{module.name}:INTEGRATION"
    for module in pkgutil.iter_modules(__path__)
    if module.ispkg
}
INTEGRATIONS = Registry("integration", "llmc.integrations", _OWN)
BUCKETS = Registry("server", parts="llmc.integrations:buckets")
CACHES = Registry("cache", parts="llmc.integrations:caches")


@cache
def integrations() -> Mapping[str, Integration]:
    """Return all integrations by name, llmc's own last. Raises InputError if another package's cannot be imported."""
    found: dict[str, Integration] = {}
    for name in sorted(INTEGRATIONS.names(), key=_OWN.__contains__):
        try:
            found[name] = INTEGRATIONS.get(name)
        except ImportError as error:
            raise InputError(
                f"the integration {name!r} of an installed package cannot be imported ({error}); repair or uninstall it"
            ) from error
    return found


def _joined(part: Callable[[Integration], Mapping[str, str]]) -> dict[str, str]:
    return {name: location for one in integrations().values() for name, location in part(one).items()}


def buckets() -> dict[str, str]:
    """Return the bucket rules by server: its name → "module:attribute"."""
    return {name: one.buckets for name, one in integrations().items() if one.buckets}


def caches() -> dict[str, str]:
    """Return the compile caches by name."""
    return _joined(lambda one: one.caches)


def logs() -> dict[str, str]:
    """Return the log and metrics formats by name."""
    return _joined(lambda one: one.logs)


def histograms() -> dict[str, str]:
    """Return the metrics' names of the histograms of a request's tokens → "prompt" or "output"."""
    return _joined(lambda one: one.histograms)


def cached_counters() -> tuple[str, ...]:
    """Return the metrics' names of counters of prompt tokens from a prefix cache; of one system, the best first."""
    return tuple(name for one in integrations().values() for name in one.cached)


def bucket_rules(name: str) -> BucketRules:
    """Create the bucket rules of the server `name`. Raises UnknownNameError, listing the known ones."""
    built: BucketRules = BUCKETS.get(name)()
    return built


def released(text: str) -> tuple[str, dict[str, Value]]:
    """Parse "vllm@0.24" as the server, and its release as a setting of its own.

    Raises UnknownNameError for an unknown server, InputError where llmc has the rules of only one release.
    """
    name, at, release = text.partition("@")
    if not at:
        return name, {}
    rules = bucket_rules(name)
    if "release" not in {setting.name for setting in rules.settings}:
        raise InputError(f"llmc has the rules of only one release of {name} ({rules.source}); leave out @{release}")
    return name, {"release": release}


def compile_cache(name: str) -> ThirdPartyCache:
    """Create the compile cache `name`. Raises UnknownNameError, listing the known ones."""
    built: ThirdPartyCache = CACHES.get(name)()
    return built
