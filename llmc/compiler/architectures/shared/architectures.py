"""The families by name, each imported when it is first asked for."""

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
    from llmc.compiler.architectures.shared.base import Config
    from llmc.compiler.architectures.shared.size import ModelSize

PLAIN = Architecture(model_class="", tiny={})
"""The family assumed for an unsupported model type when only sizes are needed."""


def architecture(config: Config) -> Architecture:
    """The family of a configuration; raises CheckpointError where its model type is not supported."""
    name = require_supported(config)
    found: Architecture = import_module(f"llmc.compiler.architectures.{FILES[name]}").ARCHITECTURES[name]
    return found


def by_gguf_architecture() -> dict[str, str]:
    """general.architecture of GGUF files → model type."""
    return dict(_by_gguf_architecture(tuple(supported())))


@cache
def _by_gguf_architecture(names: tuple[str, ...]) -> dict[str, str]:
    """Of these model types; found once, since opening a file asks several times."""
    known = {name: architecture({"model_type": name}).gguf for name in names}
    return {gguf.architecture: name for name, gguf in known.items() if gguf is not None}


def architecture_or_plain(config: Config) -> Architecture:
    """The family of a configuration, that of a plain decoder where its model type is not supported."""
    return architecture(config) if config.get("model_type") in supported() else PLAIN


def size_of(config: Config, source: str) -> ModelSize:
    """How large the model of any configuration is, with its cache as its family says. Raises CheckpointError, naming
    `source`, where a size is missing."""
    found = architecture_or_plain(config)
    size = found.size(config, source)
    with suppress(KeyError, TypeError, ValueError, AttributeError, ArithmeticError, CheckpointError):
        size = replace(size, cache=found.cache(config))  # else the sizes say what a plain decoder's is
    return size
