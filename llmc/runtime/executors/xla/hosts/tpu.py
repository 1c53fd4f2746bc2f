"""A TPU host. What a bundle asks of a TPU is checked by libtpu, when it opens the executables."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from llmc.runtime.executors.xla import client
from llmc.runtime.executors.xla.client import Platform
from llmc.runtime.executors.xla.hosts.base import Host

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle


class TpuHost(Host):
    """See the module's docstring."""

    platform: ClassVar[Platform] = "tpu"
    device: ClassVar[str] = "TPU"

    def here(self) -> bool:
        """libtpu, and a device of it that the kernel shows."""
        return client.has_tpu()

    def require(self, bundle: Bundle) -> None:
        """Nothing beside libtpu's own checks."""
