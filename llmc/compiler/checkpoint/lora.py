"""A checkpoint with LoRA adapters merged into it: an ordinary model with the adapter's name.

If lm_head and embedding are tied and an adapter changes one of them, the other keeps its values. They become two
tensors, like in PEFT before it merges.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmc.compiler.architectures.shared.names import LM_HEADS
from llmc.compiler.checkpoint.base import Checkpoint, FloatArray, require_finite
from llmc.compiler.checkpoint.peft_adapter import PeftAdapter
from llmc.compiler.checkpoint.wrapped import WrappedCheckpoint
from llmc.errors import CheckpointError


class LoraCheckpoint(WrappedCheckpoint):
    """`base` with `adapters` merged in order. Tokenizer, template and generation defaults are the base's. Raises
    CheckpointError for an adapter of another base model."""

    def __init__(self, base: Checkpoint, adapters: Sequence[PeftAdapter]) -> None:
        super().__init__(base, "+".join(adapter.name for adapter in adapters), f"{base.format}+lora")
        self.adapters = tuple(adapters)
        self._stored = {name: name for name in base.tensor_names()}
        touched = {name for adapter in adapters for name in (*adapter.changed, *adapter.replaced)}
        for head, embeddings in LM_HEADS.items():
            embedding = next((e for e in embeddings if e in self._stored), None)
            if head not in self._stored and embedding and not touched.isdisjoint({head, embedding}):
                self._stored[head] = embedding
        self._untied = len(self._stored) > len(base.tensor_names())
        for adapter in adapters:
            self._check(adapter)

    def _check(self, adapter: PeftAdapter) -> None:
        for name in adapter.changed:
            if name not in self._stored:
                of = f"; it was trained for {adapter.base}" if adapter.base else ""
                raise CheckpointError(
                    f"{adapter.path}: it changes {name}, but {self.inner.path} has no such tensor: the adapter is of "
                    f"another base model, or changes modules that cannot be merged{of}"
                )
            adapter.require_fit(name, self.shape(name))
        for name, stored in adapter.replaced.items():
            shape = adapter.file.tensors[stored].shape
            has = f"one of {list(self.shape(name))}" if name in self._stored else "no such tensor"
            if name not in self._stored or shape != self.shape(name):
                raise CheckpointError(
                    f"{adapter.path}: it replaces {name} by {list(shape)}, but {self.inner.path} has {has}: the "
                    "adapter is of another base model, or of one whose vocabulary was changed; merge it with PEFT"
                )

    @property
    def config(self) -> dict[str, Any]:
        """The base's config; `tie_word_embeddings` is False if an adapter unties lm_head."""
        return self.inner.config | ({"tie_word_embeddings": False} if self._untied else {})

    def as_stored(self, name: str) -> str | None:
        """None for a tensor that an adapter changes; for an untied lm_head, the embedding."""
        if any(name in adapter.changed or name in adapter.replaced for adapter in self.adapters):
            return None
        return self._stored.get(name, name)

    def roles(self) -> dict[str, Path]:
        """The base's files, and each adapter's with its number as prefix."""
        own = {
            f"lora.{number}/{name}": path
            for number, adapter in enumerate(self.adapters)
            for name, path in adapter.files().items()
        }
        return {**self.inner.roles(), **own}

    def tensor_names(self) -> list[str]:
        """The base's names, and an untied lm_head."""
        return sorted(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """The base's shape."""
        return self.inner.shape(self._stored.get(name, name))

    def tensor(self, name: str) -> FloatArray:
        """The tensor with every adapter's change."""
        replaced = next((a for a in reversed(self.adapters) if name in a.replaced), None)
        if replaced is None:
            values = self.inner.tensor(self._stored.get(name, name))
        else:
            values = replaced.file.tensor(replaced.replaced[name])
        for adapter in self.adapters:
            if name in adapter.changed:
                values = require_finite(adapter.apply(name, values), name, adapter.path)
        return values

    def forget(self) -> None:
        """Release the pages of all files."""
        self.inner.forget()
        for adapter in self.adapters:
            adapter.file.forget()

    def unkept(self, name: str) -> str | None:
        """For a quantized tensor that an adapter changes, "changed by an adapter", else the base's reason."""
        reason = self.inner.unkept(stored := self._stored.get(name, name))
        if self.as_stored(name) is None and (reason is not None or self.inner.stored_form(stored) is not None):
            return "changed by an adapter"
        return reason
