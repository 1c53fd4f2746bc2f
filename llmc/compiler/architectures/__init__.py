"""The model types that can be compiled, and the file in this folder with all facts about each.

A file defines ARCHITECTURES, model types → `Architecture` (shared/base.py has the contract, docs/adding.md shows one).
A model type is added only after its traced program produced the reference model's greedy tokens in a ragged, padded
batch (tests/models). Any other is refused by name, because some trace without an error and compute something else.

Nothing here imports an architecture, so that keys of code that only needs names do not depend on architectures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.errors import CheckpointError

_FILES: Mapping[str, tuple[str, ...]] = {
    "experts": ("deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "glm4_moe", "gpt_oss"),
    "gemma": ("gemma", "gemma2", "gemma3_text", "gemma4_text", "vaultgemma"),
    "gpt": ("gpt2", "gpt_bigcode", "gptj", "codegen", "gpt_neox", "bloom", "falcon", "mpt", "opt"),
    "lfm2": ("lfm2",),
    "llama": (
        "llama", "arcee", "cohere", "cohere2", "cwm", "exaone4", "granite", "granitemoe", "helium", "hunyuan_v1_dense",
        "jais2", "ministral", "ministral3", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "phi",
        "phi3", "phimoe", "smollm3", "stablelm", "starcoder2",
    ),
    "mamba": ("mamba", "falcon_mamba", "mamba2", "bamba", "falcon_h1", "granitemoehybrid", "jamba", "nemotron_h"),
    "qwen": ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
}  # fmt: skip
"""File → the model types that it defines."""
FILES = {name: file for file, names in _FILES.items() for name in names}
"""Model type → the file that defines it."""


def supported() -> list[str]:
    """The model types that can be compiled, sorted."""
    return sorted(FILES)


def require_supported(config: Mapping[str, Any]) -> str:
    """Return the model type of `config`; raise CheckpointError with the supported ones for any other."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in supported():
        own = config.get("auto_map")
        remote = f". Its checkpoint brings custom code (auto_map: {_classes(own)}), which is never run" if own else ""
        raise CheckpointError(
            f"architecture {name!r} is not supported; supported: {', '.join(supported())}. "
            f"config.json's model_type names the architecture{remote}"
        )
    return name


def _classes(auto_map: Any) -> str:
    values = auto_map.values() if isinstance(auto_map, Mapping) else [auto_map]
    return f"{', '.join(sorted(map(str, values))):.120}"
