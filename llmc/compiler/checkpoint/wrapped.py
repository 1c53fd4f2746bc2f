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
        self.asked = inner.asked
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

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape."""
        return self.inner.shape(name)

    def tensor(self, name: str) -> FloatArray:
        """Its values."""
        return self.inner.tensor(name)

    def fill(self, name: str, out: FloatArray) -> None:
        """Its values."""
        self.inner.fill(name, out)

    def forget(self) -> None:
        """Its pages."""
        self.inner.forget()

    def stored_form(self, name: str) -> BlockForm | None:
        """Its form."""
        return self.inner.stored_form(name)

    def unkept(self, name: str) -> str | None:
        """Its reason."""
        return self.inner.unkept(name)

    def quantised_blocks(self, name: str) -> QuantisedBlocks | None:
        """Its blocks."""
        return self.inner.quantised_blocks(name)

    def reordered_form(self, name: str) -> BlockForm | None:
        """Its form."""
        return self.inner.reordered_form(name)

    def reordered_blocks(self, name: str) -> QuantisedBlocks | None:
        """Its blocks."""
        return self.inner.reordered_blocks(name)

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
