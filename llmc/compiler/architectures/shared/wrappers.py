"""Multi-part checkpoints (text with images or sound) whose text part is an architecture of its own.

Their config.json has the text part's configuration under `text_config`, and their tensors' names have the text part's
name after `language_model.`. Without images the text part computes the same as the whole model: the other parts only
replace token embeddings. Other model types are refused, since some attend across their parts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from llmc.errors import CheckpointError


@dataclass(frozen=True)
class Wrapper:
    """A model type whose configuration wraps that of its text part."""

    text: str
    """The text part's model type, if `text_config` does not state it."""
    tied: bool
    """Whether lm_head is tied to the embedding, if the outer configuration does not state it."""
    others: tuple[str, ...]
    """Ignored modules, as name prefixes of their tensors; published names may have `model.` before."""


_LLAVA = ("vision_tower", "multi_modal_projector")

WRAPPERS: Mapping[str, Wrapper] = {
    "gemma3": Wrapper("gemma3_text", True, _LLAVA),
    "gemma4": Wrapper("gemma4_text", True, ("vision_tower", "embed_vision", "audio_tower", "embed_audio")),
    "mistral3": Wrapper("mistral", True, _LLAVA),
    "qwen3_5": Wrapper("qwen3_5_text", False, ("visual", "mtp")),
    "qwen3_5_moe": Wrapper("qwen3_5_moe_text", False, ("visual", "mtp")),
}
"""Model type → what it wraps. Source: transformers 5.23, configuration_*.py (`sub_configs_defaults`,
`tie_word_embeddings`), modeling_*.py (modules) and conversion_mapping.py ("llava": names of older checkpoints).
`mtp`: layers that draft further tokens, which transformers ignores (`_keys_to_ignore_on_load_unexpected`)."""

_INHERITED = ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "dtype", "torch_dtype")
_TEXT = re.compile(r"(?:model\.)?language_model\.(?:model\.)?(.+)")


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text part's configuration of a wrapper; any other configuration unchanged. Whether lm_head is tied, and the
    special tokens, come from the outer configuration. Raises CheckpointError if a wrapper has no `text_config`."""
    wrapper = WRAPPERS.get(str(config.get("model_type")))
    if wrapper is None:
        return dict(config)
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        raise CheckpointError(
            f"config.json: a {config['model_type']} model needs an object text_config, not {inner!r:.60}; "
            "fetch it again"
        )
    stated = {name: config[name] for name in _INHERITED if config.get(name) is not None}
    tied = config.get("tie_word_embeddings")
    return {
        "model_type": wrapper.text, **inner, **stated, "tie_word_embeddings": wrapper.tied if tied is None else tied,
    }  # fmt: skip


def text_tensors(config: Mapping[str, Any], stored: Collection[str]) -> tuple[dict[str, str], dict[str, int]]:
    """Stored names → names of the text part, and ignored modules → their number of tensors. `config` is the outer one.
    Names of unknown modules stay, and are refused later as unknown tensors."""
    wrapper = WRAPPERS.get(str(config.get("model_type")))
    if wrapper is None:
        return {name: name for name in stored}, {}
    kept: dict[str, str] = {}
    left_out: dict[str, int] = {}
    for name in sorted(stored):
        module = name.removeprefix("model.").split(".")[0]
        if module in wrapper.others:
            left_out[module] = left_out.get(module, 0) + 1
        else:
            kept[name] = _text_name(name)
    return kept, left_out


def _text_name(name: str) -> str:
    """`language_model.model.norm.weight` and `model.language_model.norm.weight` → `model.norm.weight`."""
    found = _TEXT.fullmatch(name)
    if found is None:
        return name
    return found[1] if found[1].startswith("lm_head.") else f"model.{found[1]}"
