"""XLA executables, through PJRT: on CPU, and on a TPU host what was compiled for its topology."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from llmc.artifacts.log import logger
from llmc.errors import ArtifactError, DeviceError
from llmc.runtime.executors.base import EXECUTABLES, Content
from llmc.runtime.executors.envelope import Envelope
from llmc.runtime.executors.xla.client import Platform, has_tpu, jax_version, open_client
from llmc.runtime.executors.xla.compile_events import JaxWitness
from llmc.runtime.executors.xla.envelope import FORM
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
        """Refuse a host without JAX, and native code for instructions that this CPU lacks."""
        from llmc.runtime.host import cpu_features

        here = jax_version()
        made = bundle.manifest.toolchain
        missing = sorted(set(bundle.manifest.isa) - set(cpu_features()))
        if missing and here == f"{made.get('jax')} {made.get('jaxlib')}":
            raise DeviceError(
                f"{bundle.path}: compiled for a CPU with {', '.join(missing)}, which this one lacks; compile it here: "
                f"{bundle.recompile_hint}"
            )

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        super().__init__(bundle, slots, capacity, threads)
        from llmc.runtime.executors.xla.arrays import JaxArrays

        self._compile_events = JaxWitness()
        platform: Platform = "tpu" if bundle.manifest.target == "tpu" and has_tpu() else "cpu"
        self._devices = open_client(platform, bundle.option("tensor_parallel", 1), threads)
        self._begin(JaxArrays(bundle, self._devices))

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
            Envelope.parse(self.bundle.files.read(file), source, FORM), name, self._devices, source, self.compilations
        )
