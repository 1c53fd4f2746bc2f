"""Tensor parallel: which dimension of each weight, and of the cache, is split over the mesh's axis "tp".

Rules are data, which each architecture states (architectures/shared/sharding.py); the one whose pattern matches a
weight's whole name decides. A weight that does not divide over the devices is replicated, and its note says so. A
weight that no rule names is an error, so that a new architecture is not silently replicated.

Names are the checkpoint's ("model.layers.3.self_attn.q_proj.weight", [out, in]); with `*` for the layer's index the
weight is a stack over layers ([layers, out, in]), whose first dimension is never split. Scales of a quantized weight
(formats.py), one for each row, are split with its rows. Of per-request adapters, B is split as the rows of its module's
weight are, and A as the columns; else they are replicated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmc.compiler.architectures.shared.architectures import architecture_or_plain
from llmc.compiler.checkpoint.adapter_layout import HIGH, LOW
from llmc.compiler.weights.stage import SCALE
from llmc.errors import CompileError, InputError
from llmc.runtime.executors.xla.envelope import AXIS

if TYPE_CHECKING:
    from llmc.compiler.architectures.shared.sharding import Count, Rule
    from llmc.compiler.targets.xla.step import Array, Core, CoreOutput, Given, Read
    from llmc.runtime.cache_shape import CacheShape, CacheTensor

Dims = tuple[str | None, ...]
"""AXIS or None for each dimension, as jax.sharding.PartitionSpec takes them."""


UNNAMED = "no rule"
"""Replaces the rule of an unnamed weight on one device, where no rule is needed."""


@dataclass(frozen=True)
class Sharding:
    """The sharding of one weight."""

    dims: Dims
    """One entry a dimension: AXIS where it is split, else None."""
    rule: str
    """Name of the rule that decided."""
    note: str = ""
    """Why it is replicated although its rule splits; else empty."""
    shape: tuple[int, ...] = ()
    """The whole weight's shape."""


def weight_shardings(
    weights: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], degree: int
) -> dict[str, Sharding]:
    """Return a sharding for each of `weights` (name to shape) over `degree` devices.

    Raises CompileError for a weight that no rule names, or whose shape is not a multiple of what `config` says.
    """
    return {name: _sharding(name, tuple(shape), config, degree) for name, shape in weights.items()}


def cache_dims(tensor: CacheTensor, degree: int) -> Dims:
    """Return a cache array's dims: whole key/value heads are split where these divide, recurrent states never."""
    if tensor.kind == "state":
        return (None,) * (2 + len(tensor.shape))
    return (None, None, AXIS if degree > 1 and tensor.shape[0] % degree == 0 else None, None, None)


def cache_words(shape: CacheShape, degree: int) -> str:
    """Describe the cache's sharding over `degree` devices for people."""
    split = [tensor for tensor in shape if AXIS in cache_dims(tensor, degree)]
    if not split:
        return "replicated"
    heads = sorted({tensor.shape[0] for tensor in shape.kv} - {tensor.shape[0] for tensor in split})
    whole = [f"keys and values of {_count(n, 'head')}" for n in heads] + ["states"] * bool(shape.states)
    return "split by key/value heads" + (f", {' and '.join(whole)} replicated" if whole else "")


def logits_dims(config: Mapping[str, Any], degree: int) -> Dims:
    """Return the dims of logits [B, V] from lm_head: split by vocabulary where lm_head is."""
    return (None, _axis(config, "vocab_size", degree))


class ShardedCore:
    """A core over `degree` devices with sharding constraints on its logits and new cache entries.

    `entries` are the dims of the cache's arrays. Without constraints, where key/value heads do not divide, XLA splits
    the replicated cache while a step writes to it, and gathers all of it afterwards; with them only new entries are
    gathered, once for all layers. Logits are first declared split like lm_head and then whole; otherwise XLA gathers
    lm_head's weight instead. Lowering needs a mesh of `degree` devices with the axis AXIS.
    """

    def __init__(self, core: Core, config: Mapping[str, Any], degree: int, entries: Sequence[Dims]) -> None:
        self.weights = core.weights
        self._core = core
        self._degree = degree
        self._entries = entries
        self._logits = logits_dims(config, degree)

    def run(self, given: Given, read: Read, weights: Sequence[Array]) -> CoreOutput:
        from jax import lax
        from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh

        mesh = AbstractMesh((self._degree,), (AXIS,))

        def lies(array: Array, dims: Dims) -> Array:
            return lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec(*dims)))

        with use_abstract_mesh(mesh):  # attention/attend.py reads it
            out = self._core.run(given, read, weights)
        return out._replace(
            logits=lies(lies(out.logits, self._logits), (None, None)),
            entries=tuple(lies(new, dims) for new, dims in zip(out.entries, self._entries, strict=True)),
        )  # fmt: skip


def describe(
    shardings: Mapping[str, Sharding],
    config: Mapping[str, Any],
    degree: int,
    cache: CacheShape,
    item_bytes: Mapping[str, int],
) -> dict[str, Any]:
    """Describe the shardings for people and manifests: rules with their weights, total and per-device sizes, notes.

    `item_bytes`: the size of each weight's elements. A weight counts once with its scales.
    """
    split_by = {rule.name: "rows" if rule.dim == 0 else "columns" for rule in _rules(config)}
    decided: dict[str, dict[str, Any]] = {}
    for name, sharding in shardings.items():
        split = AXIS in sharding.dims
        how = f"split by {split_by[sharding.rule]}" if split else "replicated"
        row = decided.setdefault(sharding.rule, {"weights": 0, "how": how, "bytes": 0, "bytes_per_device": 0})
        size = math.prod(sharding.shape) * item_bytes[name]
        row["weights"] += not name.endswith(SCALE)
        row["bytes"] += size
        row["bytes_per_device"] += size // degree if split else size
    return {
        "degree": degree,
        "rules": {name: decided[name] for name in (*split_by, UNNAMED) if name in decided},
        "cache": cache_words(cache, degree),
        "bytes": sum(row["bytes"] for row in decided.values()),
        "bytes_per_device": sum(row["bytes_per_device"] for row in decided.values()),
        "notes": list(dict.fromkeys(s.note for s in shardings.values() if s.note)),
    }


def require_degree(degree: int, devices: int, config: Mapping[str, Any], topology: str) -> None:
    """Raise InputError for a degree that `topology` has too few devices for, or that splits nothing of the model."""
    if degree < 1:
        raise InputError(f"--tensor-parallel {degree} must be at least 1")
    if degree == 1:
        return
    if degree > devices:
        raise InputError(
            f"--tensor-parallel {degree}: {topology} has {_count(devices, 'device')}; choose at most {devices}, or a "
            "larger topology (`llmc devices` lists them)"
        )
    fields = {rule.parts: rule.noun for rule in architecture_or_plain(config).sharding if rule.parts}
    if all(_parts(config, name) % degree for name in fields):
        sizes = ", ".join(f"{_parts(config, name)} {noun}" for name, noun in fields.items())
        raise InputError(
            f"--tensor-parallel {degree} splits nothing of this model: none of {sizes} divides over {degree} devices; "
            "choose a divisor of one of them"
        )


def _sharding(name: str, shape: tuple[int, ...], config: Mapping[str, Any], degree: int) -> Sharding:
    rules = _rules(config)
    unscaled = name.removesuffix(SCALE)
    factor = next((end for end in (LOW, HIGH) if unscaled.endswith(end)), "")
    names = (
        name,
        unscaled,
        f"{unscaled.removesuffix(factor)}.weight",
    )  # Gemmas have a table with a name like a scale's
    rule = next((r for r in rules if any(re.fullmatch(r.pattern, n) for n in names)), None)
    dims: list[str | None] = [None] * len(shape)
    if degree == 1:
        return Sharding(tuple(dims), rule.name if rule else UNNAMED, shape=shape)
    if rule is None:
        raise CompileError(
            f"no tensor parallel rule names the weight {name!r} {list(shape)}; its architecture's file in "
            f"llmc/compiler/architectures has those of {', '.join(r.name for r in rules)} (shared/sharding.py): "
            "add one there, or compile with --tensor-parallel 1"
        )
    if rule.dim is None or rule.parts is None or factor == (HIGH, LOW)[rule.dim == 0]:
        return Sharding(tuple(dims), rule.name, shape=shape)
    dim = rule.dim + ("*" in name)
    if name.endswith(SCALE) and dim == len(shape):  # scales of a weight that is split by columns
        return Sharding(tuple(dims), rule.name, shape=shape)
    parts = _parts(config, rule.parts)
    if dim >= len(shape) or shape[dim] % parts:
        raise CompileError(
            f"the weight {name!r} {list(shape)} does not hold the {parts} {rule.noun} of the configuration; checkpoint "
            "and config.json do not match"
        )
    if parts % degree:
        return Sharding(tuple(dims), rule.name, _note(parts, rule, degree), shape)
    dims[dim] = AXIS
    return Sharding(tuple(dims), rule.name, shape=shape)


def _rules(config: Mapping[str, Any]) -> Sequence[Rule]:
    from llmc.compiler.architectures.shared.sharding import Rule

    return *architecture_or_plain(config).sharding, Rule("adapters' masks", r"adapter_masks\.\w+", None)


def _axis(config: Mapping[str, Any], field: str, degree: int) -> str | None:
    return AXIS if degree > 1 and _parts(config, field) % degree == 0 else None


def _note(parts: int, rule: Rule, degree: int) -> str:
    verb = "does not" if parts == 1 else "do not"
    return f"{parts} {rule.noun} {verb} divide over {degree} devices: {rule.affected} are replicated"


def _parts(config: Mapping[str, Any], field: str | Count) -> int:
    """A count of config.json; without num_key_value_heads each query head has its own (transformers' default)."""
    if callable(field):
        return field(config)
    value = config.get(field)
    if value is None and field == "num_key_value_heads":
        value = config.get("num_attention_heads")
    if not isinstance(value, int) or value < 1:
        raise CompileError(f"config.json: {field} is {value!r}, but tensor parallel needs it as a positive number")
    return value


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
