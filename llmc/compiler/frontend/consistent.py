"""What a checkpoint says twice has to agree: a configuration against its own lists, and against the tensors beside it.

Else a model is built that the tensors do not fill, or one of other numbers, and the first error would name neither.
Only headers of files and the vocabulary are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from llmc.compiler.architectures.shared.families import family
from llmc.errors import CheckpointError

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import Checkpoint

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What families call the number of a layer's experts."""
USED = ("num_experts_per_tok", "top_k_experts", "moe_k")
"""What they call how many of these a token uses."""
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


def require_consistent(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError, with both sides of the first contradiction and what to do."""
    for said in _contradictions(checkpoint):
        raise CheckpointError(
            f"{checkpoint.path}: {said}; the files are of two models, or config.json was edited: fetch them again"
        )


def _contradictions(checkpoint: Checkpoint) -> Iterator[str]:
    config = checkpoint.config
    yield from _layers(config, checkpoint.tensor_names())
    yield from _windows(config)
    yield from _experts(config)
    yield from _vocabulary(checkpoint)


def _layers(config: dict[str, Any], tensors: list[str]) -> Iterator[str]:
    count = config.get("num_hidden_layers")
    if not isinstance(count, int):
        return
    for name in ("layer_types", "layers_block_type"):
        listed = config.get(name)
        if isinstance(listed, list) and len(listed) != count:
            yield f"num_hidden_layers is {count}, and {name} lists {len(listed)} layers"
    held = {int(found[1]) for name in tensors if (found := _LAYER.search(f".{name}"))}
    if held and max(held) + 1 < count:
        yield f"num_hidden_layers is {count}, and the tensors are of {max(held) + 1} layers"


def _windows(config: dict[str, Any]) -> Iterator[str]:
    """A family whose configuration leaves the window out has its default."""
    window, types = config.get("sliding_window"), config.get("layer_types")
    if type(window) is int and window < 1 and config.get("use_sliding_window") is not False:
        yield f"sliding_window is {window}, which no token is in (null switches it off)"
    sliding = isinstance(types, list) and "sliding_attention" in types
    if sliding and (("sliding_window" in config and window is None) or config.get("use_sliding_window") is False):
        yield "layer_types has sliding_attention, and sliding_window is null or switched off"


def _experts(config: dict[str, Any]) -> Iterator[str]:
    experts = next((config[name] for name in EXPERTS if isinstance(config.get(name), int)), None)
    for name in USED:
        if experts and isinstance(used := config.get(name), int) and not 0 < used <= experts:
            yield f"{name} is {used}, and a layer has {experts} experts"


def _vocabulary(checkpoint: Checkpoint) -> Iterator[str]:
    """Tokens that a tokenizer adds to its vocabulary may lie beyond the embedding, as Gemma 3's for images do."""
    size = checkpoint.config.get("vocab_size")
    if not isinstance(size, int):
        return
    names = family(checkpoint.config).names
    for name in sorted({names.embedding, names.head}.intersection(checkpoint.tensor_names())):
        if (rows := checkpoint.shape(name)[0]) != size:
            yield f"vocab_size is {size}, and {name} has {rows} rows"
    if (largest := _largest_id(checkpoint)) >= size:
        yield f"vocab_size is {size}, and the tokenizer's vocabulary has token id {largest}"


def _largest_id(checkpoint: Checkpoint) -> int:
    """Of the tokenizer's own vocabulary; -1 where there is none that says so."""
    try:
        model = json.loads(checkpoint.tokenizer_json())["model"]
        vocabulary = model["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
        return max((i for i in ids if type(i) is int), default=-1)
    except (CheckpointError, KeyError, TypeError, ValueError):
        return -1
