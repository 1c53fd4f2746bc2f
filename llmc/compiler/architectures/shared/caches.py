"""The cache of any configuration. Keys contain the shape by value, so no key of a trace depends on architectures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.compiler.architectures.shared.architectures import architecture_or_plain
from llmc.errors import CheckpointError

if TYPE_CHECKING:
    from llmc.compiler.architectures.shared.cache import Config
    from llmc.runtime.cache_shape import CacheShape, Uniform


def cache_of(config: Config) -> CacheShape:
    """The shape of a model's cache. Raises CheckpointError if the configuration lacks a size."""
    try:
        return architecture_or_plain(config).cache(config)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as e:
        kind = config.get("model_type")
        raise CheckpointError(
            f"the {kind} configuration does not say what its cache is ({type(e).__name__}: {e}); complete config.json"
        ) from e


def uniform_cache_of(config: Config, device: str) -> Uniform:
    """The cache for a device whose programs need keys and values of one size; raises CheckpointError for others."""
    found = cache_of(config).uniform
    if found is None:
        raise CheckpointError(
            f"device {device} needs keys and values of one size in every layer, but the cache of "
            f"{config.get('model_type')} has other tensors: compile for another device"
        )
    return found
