"""Architectures by name, imported on first use."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from llmc.compiler.architectures import FILES, require_supported, supported
from llmc.compiler.architectures.shared.base import Architecture
from llmc.errors import CheckpointError

if TYPE_CHECKING:
    from llmc.compiler.architectures.shared.cache import Config
    from llmc.compiler.architectures.shared.size import ModelSize

PLAIN = Architecture(model_class="", tiny={})
"""The architecture assumed for an unsupported model type when only sizes are needed."""


def architecture(config: Config) -> Architecture:
    """The architecture of a configuration. Raises CheckpointError for an unsupported model type."""
    name = require_supported(config)
    found: Architecture = import_module(f"llmc.compiler.architectures.{FILES[name]}").ARCHITECTURES[name]
    return found


def by_gguf_architecture() -> dict[str, tuple[str, ...]]:
    """general.architecture of GGUF files → model types."""
    return dict(_by_gguf_architecture(tuple(supported())))


@cache
def _by_gguf_architecture(names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        if gguf := architecture({"model_type": name}).gguf:
            found[gguf.architecture] = (*found.get(gguf.architecture, ()), name)
    return found


def architecture_or_plain(config: Config) -> Architecture:
    """The architecture of a configuration, or PLAIN for an unsupported model type."""
    return architecture(config) if config.get("model_type") in supported() else PLAIN


def size_of(config: Config, source: str) -> ModelSize:
    """Sizes of any configuration's model, with its architecture's cache. Raises CheckpointError, naming `source`, if a
    size is missing."""
    found = architecture_or_plain(config)
    size = found.size(config, source)
    with suppress(KeyError, TypeError, ValueError, AttributeError, ArithmeticError, CheckpointError):
        size = replace(size, cache=found.cache(config))  # on an error, a plain decoder's cache
    return size
