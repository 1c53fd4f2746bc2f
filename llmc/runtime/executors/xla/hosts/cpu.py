"""This host's CPU, which runs every bundle: its own natively, others from their portable programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from llmc.errors import DeviceError
from llmc.runtime.executors.xla.client import Platform, jax_version
from llmc.runtime.executors.xla.hosts.base import Host

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle


class CpuHost(Host):
    """See the module's docstring."""

    platform: ClassVar[Platform] = "cpu"
    device: ClassVar[str] = "CPU"

    def here(self) -> bool:
        """Always."""
        return True

    def require(self, bundle: Bundle) -> None:
        """Refuse native code for instructions that this CPU lacks."""
        from llmc.runtime.host import host_features

        made = bundle.manifest.toolchain
        missing = sorted(set(bundle.manifest.isa) - set(host_features()))
        if missing and jax_version() == f"{made.get('jax')} {made.get('jaxlib')}":
            raise DeviceError(
                f"{bundle.path}: compiled for a CPU with {', '.join(missing)}, which this one lacks; compile it here: "
                f"{bundle.recompile_hint}"
            )
