"""What a step on a card asks of the card; each maker's software is reached through one file of its executor."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol


class Card(Protocol):
    """A card that this process uses. `device` is torch's name of it, `name` a person's."""

    name: str
    device: Any

    def memory(self) -> tuple[int, int]:
        """Bytes free now, and bytes that the card has."""
        ...

    def put(self, tensor: Any) -> Any:
        """A copy of a tensor of the host on the card. Raises OutOfDeviceMemoryError."""
        ...

    def guarded(self) -> AbstractContextManager[None]:
        """Inside, the error that says that the card is full is an OutOfDeviceMemoryError."""
        ...

    def mark_step(self) -> None:
        """On a card that gathers operators: what was gathered is one graph. On any other nothing."""
        ...


class Mode(Protocol):
    """How steps run. Its text is what logs call it."""

    @property
    def eager(self) -> bool:
        """Whether nothing is compiled as a whole, or captured."""
        ...

    @property
    def captures(self) -> bool:
        """Whether graphs are captured."""
        ...


class Graph(Protocol):
    """A captured graph, which reads its inputs where they were, and leaves its outputs where they are."""

    def reset(self) -> None:
        """Give its memory back."""
        ...
