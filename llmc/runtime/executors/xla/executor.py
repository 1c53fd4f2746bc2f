"""XLA executables, through PJRT: on CPU, and on the host of another platform what was compiled for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from llmc.artifacts.log import logger
from llmc.errors import ArtifactError
from llmc.runtime.executors.base import EXECUTABLES, Content
from llmc.runtime.executors.envelope import Envelope
from llmc.runtime.executors.xla.client import jax_version
from llmc.runtime.executors.xla.compile_events import JaxWitness
from llmc.runtime.executors.xla.envelope import FORM
from llmc.runtime.executors.xla.hosts import HOSTS, host_for, platform_of_bundle
from llmc.runtime.executors.xla.slot_executor import SLOT_PROGRAMS, SlotExecutor

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.witness import Witness
    from llmc.runtime.executors.xla.loaded import LoadedProgram


class XlaExecutor(SlotExecutor):
    """See the module's docstring. `threads` counts where JAX has not computed in this process yet."""

    name: ClassVar[str] = "xla"
    opens: ClassVar[Mapping[str, Content]] = {
        "weights": "data", "weights.json": "data", EXECUTABLES: "code", **dict.fromkeys(SLOT_PROGRAMS, "code"),
    }  # fmt: skip

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        """Refuse a host without JAX, and what its devices cannot run."""
        jax_version()
        host_for(bundle).require(bundle)

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        super().__init__(bundle, slots, capacity, threads)
        from llmc.runtime.executors.xla.arrays import JaxArrays

        self._compile_events = JaxWitness()
        self._host = host_for(bundle)
        self._devices = self._host.open(bundle.option("tensor_parallel", 1), threads)
        self._begin(JaxArrays(bundle, self._devices))

    @property
    def in_place_of(self) -> str:
        """The platform's device, where the CPU runs the bundle."""
        platform = platform_of_bundle(self.bundle)
        return "" if platform == self._host.platform else HOSTS[platform].device

    def open_all(self) -> None:
        """Open every executable, one after the other."""
        if not self._native:
            logger().warning(
                "%s: %d executables of jax %s for %s are compiled here from their portable programs",
                self.bundle.path, len(self.bundle.manifest.executables), self.bundle.manifest.toolchain.get("jax"),
                self.bundle.manifest.device,
            )  # fmt: skip
        super().open_all()

    def witnesses(self) -> Sequence[Witness]:
        """And every compilation of JAX since the executor was opened."""
        return (*super().witnesses(), self._compile_events)

    def _load(self, file: str, name: str) -> LoadedProgram:
        from llmc.runtime.executors.xla.loaded import LoadedProgram

        if file in SLOT_PROGRAMS and file not in self.bundle.manifest.files:
            raise ArtifactError(f"{self.bundle.path}: no {file} in the bundle; compile it again")
        source = f"{self.bundle.path}: {name}"
        self.bundle.files.require_native(name)
        return LoadedProgram(
            Envelope.parse(self.bundle.files.read(file), source, FORM),
            name,
            self._host,
            self._devices,
            source,
            self.compilations,
        )


class CudaExecutor(XlaExecutor):
    """The same for bundles of cuda, whose certificates say on which card and driver they were made."""

    name: ClassVar[str] = "xla-cuda"

    @classmethod
    def host(cls) -> Mapping[str, str]:
        """Card, compute capability and driver, without opening the card."""
        return HOSTS["cuda"].facts()
