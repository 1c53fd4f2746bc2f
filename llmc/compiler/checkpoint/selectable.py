"""A checkpoint with LoRA adapters of which each request chooses one.

It adds the tensors A and B of each module that an adapter changes, stacked as in adapter_layout.py. B includes the
adapter's scale. Each column of B is then normalised to a largest value of 1, and the matching row of A takes the
factor. So values of one adapter do not affect the rounding of another that shares a block of quantized weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmc.compiler.checkpoint.adapter_layout import (
    HIGH,
    LOW,
    SELECTABLE,
    SHARING,
    AdapterGroup,
    AdapterLayout,
    beside,
    pattern_of,
)
from llmc.compiler.checkpoint.base import AdapterFacts, Checkpoint, FloatArray, require_finite
from llmc.compiler.checkpoint.lora import LoraCheckpoint
from llmc.compiler.checkpoint.peft_adapter import PeftAdapter
from llmc.compiler.checkpoint.wrapped import WrappedCheckpoint
from llmc.errors import CheckpointError

_NAME = re.compile(r"[^\s=:]{1,200}")


class SelectableCheckpoint(WrappedCheckpoint):
    """`base` with `adapters` by name. Its own name, tokenizer, template and generation defaults are the base's.

    Raises CheckpointError for an invalid name, for an adapter of another base model, and for an adapter that changes
    more than linear modules by low-rank products.
    """

    def __init__(self, base: Checkpoint, adapters: Mapping[str, PeftAdapter]) -> None:
        super().__init__(base, base.name, f"{base.format}+adapters")
        for name, adapter in adapters.items():
            if not _NAME.fullmatch(name) or name == base.name:
                why = "the base model is called that" if name == base.name else "give it one without spaces, = and :"
                raise CheckpointError(f"{adapter.path}: {name!r} cannot be the name of an adapter: {why}")
            adapter.require_selectable()
        self._peft = tuple(adapters.values())
        self._merged = [LoraCheckpoint(base, [adapter]) for adapter in self._peft]
        self._columns: dict[str, list[tuple[int, str, int, int]]] = {}
        """By member, for its whole group: adapter, member, and the first and last of its columns."""
        self.layout = AdapterLayout(tuple(self._groups()))
        self._added = {
            module + end: module
            for name in base.tensor_names()
            if self.layout.group(module := name.removesuffix(".weight")) and name.endswith(".weight")
            for end in (LOW, HIGH)
        }
        self.choices = tuple(
            AdapterFacts(name, adapter.name, max(map(adapter.rank, adapter.modules)), _leaves(adapter.modules))
            for name, adapter in adapters.items()
        )

    def _groups(self) -> Iterator[AdapterGroup]:
        ranks: list[dict[str, int]] = [{} for _ in self._peft]
        for found, adapter in zip(ranks, self._peft, strict=True):
            for module in adapter.modules:
                pattern = pattern_of(module)
                found[pattern] = max(found.get(pattern, 0), adapter.rank(module))
        widths: dict[str, set[int]] = {}
        for name in self.inner.tensor_names():
            if len(shape := self.inner.shape(name)) == 2:
                widths.setdefault(pattern_of(name.removesuffix(".weight")), set()).add(shape[1])
        left = sorted({pattern for found in ranks for pattern in found})
        while left:
            members = [member for member in _sharing(left[0]) if widths.get(member) == widths[left[0]]]
            left = [pattern for pattern in left if pattern not in members]
            at, columns, each = 0, [], []
            for number, found in enumerate(ranks):
                begin = at
                for member in members:
                    columns.append((number, member, at, at + found.get(member, 0)))
                    at += found.get(member, 0)
                each.append(at - begin)
            self._columns |= dict.fromkeys(members, columns)
            yield AdapterGroup(tuple(members), tuple(each))

    def of_adapter(self, number: int) -> Checkpoint:
        """The base, or the base with adapter `number` merged into it."""
        return self._merged[number - 1] if number else self.inner

    @property
    def config(self) -> dict[str, Any]:
        """The base's config, and the layout of the adapters."""
        return self.inner.config | {SELECTABLE: self.layout.to_json()}

    def roles(self) -> dict[str, Path]:
        """The base's files, and each adapter's with its number as prefix."""
        own = {
            f"adapter.{number}/{name}": path
            for number, adapter in enumerate(self._peft)
            for name, path in adapter.files().items()
        }
        return {**self.inner.roles(), **own}

    def tensor_names(self) -> list[str]:
        """The base's names, and A and B of each module of a group."""
        return sorted([*self.inner.tensor_names(), *self._added])

    def shape(self, name: str) -> tuple[int, ...]:
        """[R, in] for A, [out, R] for B, the base's shape for other tensors."""
        if name not in self._added:
            return self.inner.shape(name)
        module = self._added[name]
        rows, width = self.inner.shape(f"{module}.weight")
        group = self.layout.group(module)
        assert group is not None
        return (group.columns, width) if name.endswith(LOW) else (rows, group.columns)

    def tensor(self, name: str) -> FloatArray:
        """A or B stacked, or the base's tensor."""
        if name not in self._added:
            return self.inner.tensor(name)
        built, module = np.zeros(self.shape(name), np.float32), self._added[name]
        for number, member, first, last in self._columns[pattern_of(module)]:
            adapter, there = self._peft[number], beside(module, member)
            if first == last or there not in adapter.modules or (name.endswith(HIGH) and there != module):
                continue
            low, high = adapter.factors(there)
            largest = np.abs(high).max(0)
            largest[largest == 0] = 1
            end = first + len(low)
            if name.endswith(LOW):
                built[first:end] = low * largest[:, None]
            else:
                built[:, first:end] = high / largest
        return require_finite(built, name, self.path)

    def as_stored(self, name: str) -> str | None:
        """None for A and B."""
        return None if name in self._added else name

    def forget(self) -> None:
        """Release the pages of all files."""
        self.inner.forget()
        for adapter in self._peft:
            adapter.file.forget()


def _sharing(pattern: str) -> list[str]:
    """The modules that read the same input as `pattern`, itself included, as far as names tell."""
    owner, dot, leaf = pattern.rpartition(".")
    return [owner + dot + name for name in next((names for names in SHARING if leaf in names), (leaf,))]


def _leaves(modules: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(sorted({module.rpartition(".")[2] for module in modules}))
