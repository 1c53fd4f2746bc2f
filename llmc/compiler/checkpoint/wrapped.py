"""A checkpoint that overrides parts of another one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.compiler.checkpoint.base import Checkpoint, FloatArray, QuantisedBlocks

if TYPE_CHECKING:
    from llmc.compiler.architectures.shared.block_form import BlockForm


class WrappedCheckpoint(Checkpoint):
    """Delegates everything to `inner`."""

    def __init__(self, inner: Checkpoint, name: str, form: str) -> None:
        super().__init__(inner.path, name)
        self.format = form
        self.requested = inner.requested
        self.left_out = inner.left_out
        self.choices = inner.choices
        self.inner = inner

    @property
    def notices(self) -> Sequence[str]:
        """The inner checkpoint's lines."""
        return self.inner.notices

    @property
    def config(self) -> dict[str, Any]:
        """The inner checkpoint's configuration."""
        return self.inner.config

    def roles(self) -> dict[str, Path]:
        """The inner checkpoint's files."""
        return self.inner.roles()

    def _value_digest(self, role: str) -> str | None:
        return self.inner._value_digest(role) if role in self.inner.roles() else None

    def tensor_names(self) -> list[str]:
        """The inner checkpoint's names."""
        return self.inner.tensor_names()

    def as_stored(self, name: str) -> str | None:
        """The inner checkpoint's name of an unchanged tensor; None for a tensor that is built here."""
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        """The inner checkpoint's shape."""
        return self.inner.shape(name)

    def tensor(self, name: str) -> FloatArray:
        """The inner checkpoint's values."""
        return self.inner.tensor(name)

    def fill(self, name: str, out: FloatArray) -> None:
        """Read an unchanged tensor directly from the inner checkpoint."""
        if (stored := self.as_stored(name)) is None:
            out[...] = self.tensor(name)
        else:
            self.inner.fill(stored, out)

    def forget(self) -> None:
        """Release the inner checkpoint's pages."""
        self.inner.forget()

    def stored_form(self, name: str) -> BlockForm | None:
        """The inner checkpoint's form of an unchanged tensor, else None."""
        return None if (stored := self.as_stored(name)) is None else self.inner.stored_form(stored)

    def unkept(self, name: str) -> str | None:
        """The inner checkpoint's reason for an unchanged tensor, else None."""
        return None if (stored := self.as_stored(name)) is None else self.inner.unkept(stored)

    def quantised_blocks(self, name: str) -> QuantisedBlocks | None:
        """The inner checkpoint's blocks of an unchanged tensor, else None."""
        return None if (stored := self.as_stored(name)) is None else self.inner.quantised_blocks(stored)

    def reordered_form(self, name: str) -> BlockForm | None:
        """The inner checkpoint's form of an unchanged tensor, else None."""
        return None if (stored := self.as_stored(name)) is None else self.inner.reordered_form(stored)

    def reordered_blocks(self, name: str) -> QuantisedBlocks | None:
        """The inner checkpoint's blocks of an unchanged tensor, else None."""
        return None if (stored := self.as_stored(name)) is None else self.inner.reordered_blocks(stored)

    def tokenizer_json(self) -> bytes:
        """The inner checkpoint's tokenizer."""
        return self.inner.tokenizer_json()

    def chat_template(self) -> str | None:
        """The inner checkpoint's template."""
        return self.inner.chat_template()

    def special_tokens(self) -> dict[str, str]:
        """The inner checkpoint's tokens."""
        return self.inner.special_tokens()

    def generation_config(self) -> dict[str, Any]:
        """The inner checkpoint's defaults."""
        return self.inner.generation_config()
