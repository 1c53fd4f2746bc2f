"""The model types that may be compiled: one file in this folder for each, with all facts about it.

The file's name is the model type, as config.json has it; it defines FAMILY (shared/base.py has the contract,
docs/adding-an-architecture.md shows one). A file is added only after its traced program gave the reference model's
greedy tokens in a ragged, padded batch (tests/models). Any other model type is refused by name, because some
models trace without an error and compute something else.

Nothing here imports a family, so that keys of code that only needs the names do not depend on the families.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pkgutil import iter_modules
from typing import Any

from llmc.errors import CheckpointError


def supported() -> list[str]:
    """The model types that may be compiled, sorted."""
    return list(_files(tuple(__path__)))


@cache
def _files(folders: tuple[str, ...]) -> tuple[str, ...]:
    """Read once: a compile asks hundreds of times."""
    return tuple(sorted(module.name for module in iter_modules(folders) if not module.ispkg))


def require_supported(config: Mapping[str, Any]) -> str:
    """Return the model type of `config`, or raise CheckpointError naming it and the supported ones."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in supported():
        own = config.get("auto_map")
        remote = (
            f". Its checkpoint brings code of its own (auto_map: {_classes(own)}), which is never run" if own else ""
        )
        raise CheckpointError(
            f"architecture {name!r} is not supported; supported: {', '.join(supported())}. "
            f"config.json's model_type names the architecture{remote}"
        )
    return name


def _classes(auto_map: Any) -> str:
    """The classes that config.json's auto_map names, as far as it is of transformers' form."""
    values = auto_map.values() if isinstance(auto_map, Mapping) else [auto_map]
    return f"{', '.join(sorted(map(str, values))):.120}"
