"""Folders that store each expert's matrices separately, read as transformers 5 has them: one tensor [E, …] for all.

A convention lists the stored names. Source: transformers 5.23, conversion_mapping.py. Merged tensors are read as they
are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llmc.compiler.architectures.shared.experts import first_of
from llmc.compiler.checkpoint.base import FloatArray, QuantisedBlocks
from llmc.compiler.checkpoint.huggingface import ArchitectureReader, HuggingFaceCheckpoint
from llmc.errors import CheckpointError

if TYPE_CHECKING:
    from llmc.compiler.architectures.shared.block_form import BlockForm


@dataclass(frozen=True)
class Convention:
    """Names after `model.layers.N.`.

    `parts`: an expert's matrices (the name after `experts.N.`) → the merged tensor that holds them, in the order of its
    rows. `renamed`: pattern and replacement for tensors that only have another name.
    """

    parts: Mapping[str, str]
    renamed: tuple[tuple[str, str], ...] = ()


_GATE_UP = {
    "gate_proj.weight": "gate_up_proj", "up_proj.weight": "gate_up_proj", "down_proj.weight": "down_proj",
}  # fmt: skip
_W123 = {"w1.weight": "gate_up_proj", "w3.weight": "gate_up_proj", "w2.weight": "down_proj"}
CONVENTIONS = {
    "gate_up": Convention(_GATE_UP),
    "gate_up-statics": Convention(_GATE_UP, ((r"^mlp\.moe_statics\.", "mlp.gate.moe_statics."),)),
    "w123": Convention(_W123, ((r"^block_sparse_moe\.", "mlp."),)),
    "w123-router": Convention(_W123, ((r"^block_sparse_moe\.", "mlp."), (r"^mlp\.gate\.weight$", "mlp.router.weight"))),
    "up_down": Convention({"up_proj.weight": "up_proj", "down_proj.weight": "down_proj"}),
    "linear": Convention(
        {},
        (
            (r"^block_sparse_moe\.input_linear\.weight$", "block_sparse_moe.experts.gate_up_proj"),
            (r"^block_sparse_moe\.output_linear\.weight$", "block_sparse_moe.experts.down_proj"),
            (r"^block_sparse_moe\.router\.layer\.weight$", "block_sparse_moe.router.weight"),
        ),
    ),
}
_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)")
_PART = re.compile(r"(.*\bexperts)\.(\d+)\.(.+)")


class ExpertsCheckpoint(HuggingFaceCheckpoint):
    """A folder whose experts are merged on reading. `count`: config.json keys with the number of experts. Raises
    CheckpointError if the tensors have another number."""

    def __init__(
        self, path: Path, name: str | None, facts: ArchitectureReader | None, convention: str, count: Sequence[str]
    ) -> None:
        super().__init__(path, name, facts)
        self._count = count
        self._sources = self._merged(CONVENTIONS[convention])

    def _merged(self, convention: Convention) -> dict[str, list[list[str]]]:
        """transformers' name of each tensor → for each expert, the stored names of its parts in order."""
        order = list(convention.parts)
        found: dict[str, list[list[str]]] = {}
        experts: dict[str, dict[tuple[int, int], str]] = {}
        for stored in super().tensor_names():
            name = _renamed(stored, convention)
            part = _PART.fullmatch(name)
            if part is None or part[3] not in convention.parts:
                found[name] = [[stored]]
                continue
            merged = f"{part[1]}.{convention.parts[part[3]]}"
            experts.setdefault(merged, {})[int(part[2]), order.index(part[3])] = stored
        for name, parts in experts.items():
            sides = sorted(i for i, part in enumerate(order) if convention.parts[part] == name.rpartition(".")[2])
            held = sorted({expert for expert, _ in parts})
            if set(parts) != {(expert, side) for expert in range(len(held)) for side in sides} or name in found:
                missing = next(
                    (f"{name.rpartition('.')[0]}.{e}.{order[s]}" for e in range(held[-1] + 1) for s in sides
                     if (e, s) not in parts), name,
                )  # fmt: skip
                raise CheckpointError(
                    f"{self.path}: experts are stored separately, and {missing} is missing: fetch it again"
                )
            found[name] = [[parts[expert, side] for side in sides] for expert in held]
        for name, sources in found.items():
            self._require_count(name, sources)
        return found

    def _require_count(self, name: str, parts: list[list[str]]) -> None:
        if not re.search(r"\bexperts\.(?:gate_up|down)_proj$", name):
            return
        stored = len(parts) if _PART.search(parts[0][0]) else super().shape(parts[0][0])[0]
        stated = first_of(self._config, self._count)
        if stored != stated:
            raise CheckpointError(
                f"{self.path}: {name} has {stored} experts, but {' or '.join(self._count)} in config.json says "
                f"{stated!r}: the configuration is of another model; fetch both again"
            )

    def tensor_names(self) -> list[str]:
        """Names as in transformers."""
        return sorted(self._sources)

    def _parts(self, name: str) -> list[list[str]]:
        """Stored names of each expert; for a tensor that is not merged, even an unknown one, its own name."""
        return self._sources.get(name, [[name]])

    def stored_form(self, name: str) -> BlockForm | None:
        """For a merged tensor, the form of all its parts if they differ in zero points at most; else None."""
        forms = [super(ExpertsCheckpoint, self).stored_form(part) for parts in self._parts(name) for part in parts]
        held = {form for form in forms if form is not None}
        alike = len({replace(form, offsets="") for form in held}) == 1 and None not in forms
        return max(held, key=lambda form: form.offsets) if alike else None

    def quantised_blocks(self, name: str) -> QuantisedBlocks | None:
        """For a merged tensor, [E · N, K]: experts stacked by rows."""
        if self.stored_form(name) is None:
            return None
        experts = self._parts(name)
        blocks = [super(ExpertsCheckpoint, self).quantised_blocks(part) for parts in experts for part in parts]
        return QuantisedBlocks.stacked([built for built in blocks if built is not None], len(experts))

    def reordered_form(self, name: str) -> BlockForm | None:
        """None for a merged tensor: experts keep the order of their inputs."""
        parts = self._parts(name)
        return None if _is_merged(parts) else super().reordered_form(parts[0][0])

    def reordered_blocks(self, name: str) -> QuantisedBlocks | None:
        """None for a merged tensor."""
        parts = self._parts(name)
        return None if _is_merged(parts) else super().reordered_blocks(parts[0][0])

    def unkept(self, name: str) -> str | None:
        """For a merged tensor without blocks, the format of its first part, or a note that the parts differ."""
        first = self._parts(name)[0][0]
        if self.stored_form(name) is not None:
            return None
        return super().unkept(first) or ("experts in different forms" if super().stored_form(first) else None)

    def shape(self, name: str) -> tuple[int, ...]:
        """For a merged tensor, the shape with all experts."""
        parts = self._parts(name)
        if not _is_merged(parts):
            return super().shape(parts[0][0])
        rows, *rest = super().shape(parts[0][0])
        return (len(parts), rows * len(parts[0]), *rest)

    def tensor(self, name: str) -> FloatArray:
        """For a merged tensor, all experts in float32."""
        parts = self._parts(name)
        if not _is_merged(parts):
            return super().tensor(parts[0][0])
        merged: FloatArray = np.empty(self.shape(name), np.float32)
        for expert, sources in enumerate(parts):
            rows = merged[expert].reshape(len(sources), -1, merged.shape[2])
            for side, source in enumerate(sources):
                matrix = super().tensor(source)
                if matrix.shape != rows[side].shape:
                    raise CheckpointError(
                        f"{self.path}: tensor {source} is {list(matrix.shape)}, another expert's "
                        f"{list(rows[side].shape)}: the checkpoint is damaged; fetch it again"
                    )
                rows[side] = matrix
        return merged


def _is_merged(parts: list[list[str]]) -> bool:
    return bool(_PART.search(parts[0][0]))


def _renamed(stored: str, convention: Convention) -> str:
    found = _LAYER.fullmatch(stored)
    if found is None:
        return stored
    name = found[2]
    for pattern, new in convention.renamed:
        name = re.sub(pattern, new, name)
    return found[1] + name
