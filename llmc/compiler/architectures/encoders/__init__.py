"""The model types that may be compiled to embed or score: one file in this folder for each, as for decoders.

The file's name is the model type, as config.json has it; it defines ENCODER (base.py has the contract).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from llmc.errors import CheckpointError

if TYPE_CHECKING:
    from llmc.compiler.architectures.encoders.base import EncoderFamily


def encoders() -> list[str]:
    """The model types that may embed or score, sorted."""
    return sorted(module.name for module in iter_modules(__path__) if module.name != "base")


def encoder_family(config: Mapping[str, Any]) -> EncoderFamily:
    """The family of a configuration; raises CheckpointError naming its model type and the supported ones."""
    name = str(config.get("model_type")).replace("-", "_")
    if name not in encoders():
        raise CheckpointError(
            f"architecture {config.get('model_type')!r} is not supported for embedding or scoring; supported: "
            f"{', '.join(encoders())}. config.json's model_type names the architecture"
        )
    found: EncoderFamily = import_module(f"{__name__}.{name}").ENCODER
    return found
