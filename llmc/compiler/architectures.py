"""Which model types may be compiled, and what is known of each.

A model type is listed once its traced program reproduced the reference model's greedy tokens in a ragged, padded
batch (tests/compiler/test_frontend.py). Anything else is refused by name: some models trace without complaint
and compute something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.errors import CheckpointError

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")


def require_supported(config: Mapping[str, Any]) -> str:
    """Return the model type of `config`, or raise CheckpointError naming it and the supported ones."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in SUPPORTED:
        raise CheckpointError(
            f"architecture {name!r} is not supported; supported: {', '.join(SUPPORTED)}. "
            "config.json's model_type names the architecture"
        )
    return name
