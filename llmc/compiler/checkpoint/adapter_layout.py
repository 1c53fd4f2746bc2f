"""Layout of the LoRA adapters that requests choose from, as a model's configuration describes it.

    config[SELECTABLE] = {"groups": [{"members": [MODULE, …], "ranks": [columns of the first adapter, …]}, …]}

A MODULE is the name of a linear module with "*" in place of the layer number. Modules that read one input form a group.
One matmul computes the low-rank products of all adapters for all members of a group. A [R, in] has a row for each rank
of each adapter at each member, adapter by adapter, padded with zeros to a multiple of ALIGNED:

    y of member m = W_m x + bias_m + B_m (mask ⊙ A x)        B_m [out_m, R], zero in columns of other members

mask [R] is 1 in the columns of the adapter that the token's sequence has chosen, else 0. All members hold the same A,
as "m.lora_A.weight", and each its own B, "m.lora_B.weight".
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import FloatArray

SELECTABLE = "selectable_adapters"
ADAPTERS = "adapters"
"""The program input with the adapter of each token, [B, Q] int64, 0 for none."""
LOW, HIGH = ".lora_A.weight", ".lora_B.weight"
ALIGNED = 64
"""A group's column count is a multiple of this, so that blocks of quantized weights are full."""
SHARING = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules that read one input in transformers' decoders."""
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def of_adapters(names: Iterable[str]) -> bool:
    """Whether a matrix of these tensors is an adapter's A or B. These stay in 8 bits where others have 4."""
    return any(name.endswith((LOW, HIGH)) for name in names)


def pattern_of(module: str) -> str:
    """A module's name with "*" in place of its layer number."""
    return _LAYER.sub("*", module, count=1)


def beside(module: str, pattern: str) -> str:
    """The module of `pattern` in the same layer as `module`."""
    found = _LAYER.search(module)
    return pattern.replace("*", found[0], 1) if found else pattern


@dataclass(frozen=True)
class AdapterGroup:
    """Modules that read one input: `members` by pattern, and `ranks`, the column count of each adapter."""

    members: tuple[str, ...]
    ranks: tuple[int, ...]

    @property
    def columns(self) -> int:
        return -(-sum(self.ranks) // ALIGNED) * ALIGNED

    def masks(self) -> FloatArray:
        """The mask of each choice, [adapters + 1, R]; row 0, for no adapter, is 0."""
        import numpy as np

        built = np.zeros((len(self.ranks) + 1, self.columns), np.float32)
        ends = np.cumsum((0, *self.ranks))
        for number in range(len(self.ranks)):
            built[number + 1, ends[number] : ends[number + 1]] = 1
        return built


@dataclass(frozen=True)
class AdapterLayout:
    """All adapter groups of a model."""

    groups: tuple[AdapterGroup, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> AdapterLayout | None:
        stated = config.get(SELECTABLE)
        if stated is None:
            return None
        return cls(tuple(AdapterGroup(tuple(g["members"]), tuple(g["ranks"])) for g in stated["groups"]))

    def to_json(self) -> dict[str, Any]:
        return {"groups": [{"members": list(g.members), "ranks": list(g.ranks)} for g in self.groups]}

    @cached_property
    def _of(self) -> dict[str, AdapterGroup]:
        return {member: group for group in self.groups for member in group.members}

    def group(self, module: str) -> AdapterGroup | None:
        return self._of.get(pattern_of(module))

    def held_as(self, name: str, names: Container[str]) -> str:
        """The name in `names` of a tensor equal to `name`: for an A, that of the group's first member."""
        module = name.removesuffix(LOW)
        group = self.group(module) if name.endswith(LOW) else None
        members = () if group is None else group.members
        return next((low for m in members if (low := beside(module, m) + LOW) in names), name)


def step_inputs(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of a program's inputs before its cache: shapes [B, Q], [B], [B], and [B, Q]."""
    return ("token_ids", "past_lengths", "new_lengths", *([ADAPTERS] if SELECTABLE in config else []))
