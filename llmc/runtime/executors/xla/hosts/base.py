"""The contract of a platform as this process finds it: whether it is here, what it needs, and opening it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from llmc.runtime.executors.xla.client import Platform, open_client

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle


class Host(ABC):
    """See the module's docstring. One object stands for it in the whole process."""

    platform: ClassVar[Platform]
    """XLA's name of it."""
    device: ClassVar[str]
    """What a host has where it has it, in words: "TPU"."""

    @abstractmethod
    def here(self) -> bool:
        """Whether this process can use such a device. Imports no JAX. Raises DeviceError where there is one that
        cannot be used."""

    @abstractmethod
    def require(self, bundle: Bundle) -> None:
        """Refuse a bundle that the devices here cannot run, before anything is loaded. Called where it is here.

        Raises DeviceError, ArtifactError or OutOfDeviceMemoryError that says what differs.
        """

    def facts(self) -> Mapping[str, str]:
        """What certificates say of the device here; empty where there is none."""
        return {}

    def open(self, devices: int, threads: int) -> list[Any]:
        """The first `devices` JAX devices of it, see `open_client`. Raises DeviceError."""
        return open_client(self.platform, devices, threads)

    def load(self, native: bytes, devices: Sequence[Any]) -> Any:
        """An executable of this platform from PJRT's serialisation; raises what XLA raises."""
        from jaxlib import _jax

        return devices[0].client.deserialize_executable(native, _jax.DeviceList(tuple(devices)))
