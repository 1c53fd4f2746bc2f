"""How many of a checkpoint's quantized matrices a lowered model keeps exactly: a line of the compile summary."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from llmc.compiler.checkpoint.base import coded_names
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.weights.recipes import Recipe

_KEPT = "kept"
_LEAST = ("exact", "floats")
_FLOATS = ("dense", "transposed", "table", "experts_in_turn")
_KEEP_FOUR = frozenset({"q4", "pq4", "eachpq4", "turnedpq4", "u4"})


def require_quantized(checkpoint: Checkpoint) -> None:
    """Raise InputError if `--quantize keep` has nothing to keep: the checkpoint has no quantized matrix."""
    if not coded_names(checkpoint):
        raise InputError(
            f"--quantize keep: {checkpoint.path} has no quantized matrix to keep (GGUF Q2_K to Q8_0 and IQ4; gptq, "
            "awq, compressed-tensors); pass --quantize int8 or int4, or compile a checkpoint in one of these formats"
        )


def kept_in(recipes: bytes, checkpoint: Checkpoint) -> dict[str, Any]:
    """Count how the recipes of a lowering hold the matrices that the checkpoint stores quantized.

    Returns {"kept": {"exact": count, "wider": {format: count of exact ones in more bits than stored}, "floats": count
    as float32 (exact as well), "rounded": {reason: count}}} for a target's analysis; empty if no matrix is stored
    quantized.
    """
    from llmc.compiler.weights.recipes import read_recipes, stored_names

    names, coded = set(checkpoint.tensor_names()), set(coded_names(checkpoint))
    if not coded:
        return {}
    held: dict[str, set[str]] = {}
    wider: dict[str, str] = {}
    for recipe in read_recipes(recipes):
        for name in coded.intersection(chain.from_iterable(stored_names(source, names) for source in recipe.sources)):
            held.setdefault(name, set()).add(_held(recipe, name, checkpoint))
            wider |= _wider(recipe, name, checkpoint)
    least = {name: min(found, key=_rank) for name, found in held.items()}
    counted = Counter(least.values())
    exact, floats = (counted.pop(how, 0) for how in _LEAST)
    grown = Counter(what for name, what in wider.items() if least[name] == "exact")
    wider_counts, rounded = (dict(sorted(each.items())) for each in (grown, counted))
    return {_KEPT: {"exact": exact, "wider": wider_counts, "floats": floats, "rounded": rounded}}


def kept_lines(analysis: Mapping[str, Any]) -> list[str]:
    """Format the result of `kept_in` as lines for people."""
    if _KEPT not in analysis:
        return []
    found = analysis[_KEPT]
    wider = found["wider"]
    more = f" ({sum(wider.values())} in more bits than stored: {_listed(wider)})" if wider else ""
    parts = [f"{found['exact']} kept exactly{more}"]
    if found["floats"]:
        parts.append(f"{found['floats']} widened to float32")
    if found["rounded"]:
        parts.append(f"{sum(found['rounded'].values())} rounded again ({_listed(found['rounded'])})")
    return [f"quantized matrices of the checkpoint: {', '.join(parts)}"]


def _listed(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counted.items())


def _rank(found: str) -> tuple[int, str]:
    """A reason ranks first: a matrix that two recipes hold is exact only if both hold it exactly."""
    return (1 + _LEAST.index(found) if found in _LEAST else 0), found


def _wider(recipe: Recipe, name: str, checkpoint: Checkpoint) -> dict[str, str]:
    """{name: format} if a recipe holds the tensor's quantized weights in more bits than stored, else {}."""
    form, family = checkpoint.stored_form(name) or checkpoint.reordered_form(name), _family(recipe)
    if form is None or not ("kept" in family or family in _KEEP_FOUR):
        return {}
    digit = re.search(r"\d", family)
    bits = int(digit[0]) if digit else 8
    return {name: f"{form.type} in {bits}"} if bits > (form.stored_bits or form.bits) else {}


def _family(recipe: Recipe) -> str:
    return recipe.transform.split("_", 1)[0]


def _held(recipe: Recipe, name: str, checkpoint: Checkpoint) -> str:
    """One of _LEAST, or the reason why the tensor is rounded again."""
    if recipe.transform in _FLOATS:
        return "floats"
    form = checkpoint.reordered_form(name) if recipe.reordered else checkpoint.stored_form(name)
    if form is None:
        return f"{checkpoint.unkept(name)}{' in float16' if _family(recipe) == 'f16' else ''}"
    family = _family(recipe)
    if "kept" not in family and not (family in _KEEP_FOUR and form.bits == 4 and not form.block % recipe.block):
        return (
            "experts of two forms, or without --quantize keep"
            if family.startswith(("each", "turned"))
            else "without --quantize keep"
        )
    in_panels = family.removeprefix("each").removeprefix("turned").startswith("p")
    return "float32 scales in float16" if in_panels and form.scales == "float32" else "exact"
