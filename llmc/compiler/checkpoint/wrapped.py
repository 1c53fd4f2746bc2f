"""A checkpoint that changes some of what another one says; all else is that one's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.compiler.checkpoint.base import Checkpoint, FloatArray, QuantisedBlocks

if TYPE_CHECKING:
    from llmc.compiler.architectures.shared.block_form import BlockForm


class WrappedCheckpoint(Checkpoint):
    """Everything as `inner` has it."""

    def __init__(self, inner: Checkpoint, name: str, form: str) -> None:
        super().__init__(inner.path, name)
        self.format = form
        self.requested = inner.requested
        self.left_out = inner.left_out
        self.notices = inner.notices
        self.choices = inner.choices
        self.inner = inner

    @property
    def config(self) -> dict[str, Any]:
        """As the inner one has it; so all below."""
        return self.inner.config

    def roles(self) -> dict[str, Path]:
        """Its files."""
        return self.inner.roles()

    def _value_digest(self, role: str) -> str | None:
        return self.inner._value_digest(role) if role in self.inner.roles() else None

    def tensor_names(self) -> list[str]:
        """Its names."""
        return self.inner.tensor_names()

    def as_stored(self, name: str) -> str | None:
        """The inner one's name of a tensor that it has just so; None for one that is made here."""
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape."""
        return self.inner.shape(name)

    def tensor(self, name: str) -> FloatArray:
        """Its values."""
        return self.inner.tensor(name)

    def fill(self, name: str, out: FloatArray) -> None:
        """Straight from the inner one what is as stored there."""
        if (stored := self.as_stored(name)) is None:
            out[...] = self.tensor(name)
        else:
            self.inner.fill(stored, out)

    def forget(self) -> None:
        """Its pages."""
        self.inner.forget()

    def stored_form(self, name: str) -> BlockForm | None:
        """None of what is made here; so all below."""
        return None if (stored := self.as_stored(name)) is None else self.inner.stored_form(stored)

    def unkept(self, name: str) -> str | None:
        """The inner one's reason."""
        return None if (stored := self.as_stored(name)) is None else self.inner.unkept(stored)

    def quantised_blocks(self, name: str) -> QuantisedBlocks | None:
        """The inner one's blocks."""
        return None if (stored := self.as_stored(name)) is None else self.inner.quantised_blocks(stored)

    def reordered_form(self, name: str) -> BlockForm | None:
        """The inner one's form."""
        return None if (stored := self.as_stored(name)) is None else self.inner.reordered_form(stored)

    def reordered_blocks(self, name: str) -> QuantisedBlocks | None:
        """The inner one's blocks."""
        return None if (stored := self.as_stored(name)) is None else self.inner.reordered_blocks(stored)

    def tokenizer_json(self) -> bytes:
        """Its tokenizer."""
        return self.inner.tokenizer_json()

    def chat_template(self) -> str | None:
        """Its template."""
        return self.inner.chat_template()

    def special_tokens(self) -> dict[str, str]:
        """Its tokens."""
        return self.inner.special_tokens()

    def generation_config(self) -> dict[str, Any]:
        """Its defaults."""
        return self.inner.generation_config()
