"""Every tensor and key of a checkpoint has to be read: one that nothing reads shows that the model is a different one.

Verification would not notice the error, because the same transformers code builds the reference from the same
configuration. The families list what is read and what changes no number (architectures/). Anything else is refused by
name. A key that is null switches nothing on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from llmc.compiler.architectures import require_supported
from llmc.compiler.architectures.shared.config_keys import HARMLESS, NEUTRAL, READ, ROPE
from llmc.compiler.architectures.shared.families import family
from llmc.compiler.frontend.consistent import require_consistent
from llmc.errors import CheckpointError

if TYPE_CHECKING:
    from llmc.compiler.architectures.shared.base import Family
    from llmc.compiler.checkpoint.base import Checkpoint

SHOWN = 3

COMPUTED = (".rotary_emb.inv_freq", ".position_ids", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
"""Ends of the names of tensors that older versions of transformers wrote and that the configuration determines."""


def require_readable(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for an architecture that is not supported, and as `require_consumed`."""
    require_supported(checkpoint.config)
    require_consumed(checkpoint)


def require_consumed(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError, naming the first of them, where the checkpoint has tensors or keys that nothing reads, or
    contradicts itself. What adapters bring that requests choose is read by the modules that they change."""
    checkpoint = checkpoint.of_adapter(0)
    require_consistent(checkpoint)
    keys = list(_left_over_keys(checkpoint.config))
    if keys:
        raise CheckpointError(
            f"{checkpoint.path}: the configuration says {_shown(keys)}, which nothing reads in architecture "
            f"{checkpoint.config['model_type']!r}: the model would be another one, and its reference too; if that "
            "changes no number, take it out of config.json; else the model is not supported"
        )
    needed = tensor_names(checkpoint.config)
    computed = (*COMPUTED, *family(checkpoint.config).computed)
    ignored = family(checkpoint.config).ignored(checkpoint.config)
    tensors = [
        name
        for name in checkpoint.tensor_names()
        if name not in needed and not name.endswith(computed) and not (ignored and re.fullmatch(ignored, name))
    ]
    if tensors:
        raise CheckpointError(
            f"{checkpoint.path}: nothing in architecture {checkpoint.config['model_type']!r} takes the tensors "
            f"{_shown(tensors)}: its configuration leaves out what they are for, or the model is not supported"
        )


def tensor_names(config: Mapping[str, Any]) -> set[str]:
    """The names of every tensor that the model of a supported configuration has; a tied head's too."""
    return family(config).tensor_names(config)


def _left_over_keys(config: Mapping[str, Any]) -> Iterator[str]:
    own = family(config)
    stated = own.in_common_terms({name: v for name, v in config.items() if name not in own.unread})
    known = READ - own.unread | own.reads | own.harmless | frozenset().union(*HARMLESS.values())
    known |= {*own.keys, *own.keys.values(), *own.derived(stated)}
    neutral = {**NEUTRAL, **own.allows}
    for name, value in config.items():
        if value is None or name in known or any(value == allowed for allowed in neutral.get(name, ())):
            continue
        if name == "rope_scaling" and not config.get("rope_parameters"):  # transformers reads it only then
            yield from _left_over_rope(name, value, own)
        else:
            yield f"{name}: {value!r:.60}"
    if config.get("rope_parameters"):
        yield from _left_over_rope("rope_parameters", config["rope_parameters"], own)


def _left_over_rope(where: str, rope: Any, own: Family) -> Iterator[str]:
    if not isinstance(rope, Mapping):
        yield f"{where}: {rope!r:.60}"
        return
    if "layer_types" in own.reads and rope and all(isinstance(part, Mapping) for part in rope.values()):
        for kind, part in rope.items():
            yield from _left_over_rope(f"{where}.{kind}", part, own)
        return
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE:
        yield f"{where}.rope_type: {kind!r:.60}"
        return
    read = ROPE[kind] | own.reads | own.rope.get(kind, frozenset()) | {"rope_type", "type", "rope_theta"}
    for name, value in rope.items():
        if value is None or name in read:
            continue
        if not any(value == allowed for allowed in NEUTRAL.get(name, ())):
            yield f"{where}.{name}: {value!r:.60}"


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
