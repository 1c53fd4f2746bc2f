"""What is known of a machine that is only described: its devices, their memory, and how arrays lie in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar


class DescribedMachine(ABC):
    """Equal devices that one graph can be sharded over. Bytes are of one device."""

    larger: ClassVar[str]
    """What to choose where nothing fits, in words: "a topology of larger chips"."""

    @property
    @abstractmethod
    def name(self) -> str:
        """As users write it."""

    @property
    @abstractmethod
    def devices(self) -> int:
        """How many it has."""

    @property
    @abstractmethod
    def usable_bytes(self) -> int:
        """What programs may take of a device's memory."""

    @property
    @abstractmethod
    def unit(self) -> str:
        """What one device is, in words."""

    @property
    @abstractmethod
    def components(self) -> dict[str, str]:
        """Key components: all that executables depend on."""

    @abstractmethod
    def array_bytes(self, shape: Sequence[int], item_bytes: int) -> int:
        """Bytes that an array takes on a device, padding included."""

    @abstractmethod
    def describe(self) -> list[Any]:
        """Its JAX devices, which can be compiled for and not run on; xla/client.py readies the process.

        Raises DeviceError, with the line that installs it, where a package is missing or refuses.
        """
