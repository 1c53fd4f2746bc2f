"""An executable on this host's devices: opened from PJRT's own serialisation, run without tracing anything.

Nothing here unpickles. PJRT's bytes are machine code and its description: they are opened only after their digest was
checked against the manifest, and from a remote store only where the manifest is signed (reliability: P3, P12, P15).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmc.artifacts.log import logger
from llmc.errors import ArtifactError
from llmc.runtime.executors.compilations import CompilationCounter
from llmc.runtime.executors.envelope import Envelope
from llmc.runtime.executors.xla.client import toolchain_version
from llmc.runtime.executors.xla.compile_events import told
from llmc.runtime.executors.xla.envelope import StepHeader
from llmc.runtime.executors.xla.exported import compile_exported, mesh_of, sharding_of
from llmc.runtime.executors.xla.hosts.base import Host


class LoadedProgram:
    """One program of a bundle, ready to run. `header` says what it takes and gives."""

    def __init__(
        self,
        envelope: Envelope,
        name: str,
        host: Host,
        devices: Sequence[Any],
        source: str,
        compilations: CompilationCounter,
    ) -> None:
        """Open the native section where it is of this JAX and of `host`'s platform; else compile the portable one for
        its `devices`, and count it.

        `native` says which it was.
        Raises ArtifactError when neither can be opened.
        """
        self.header = StepHeader.parse(envelope.header, source)
        self._mesh = mesh_of(devices)
        self._shardings = [sharding_of(self._mesh, t) for t in self.header.outputs]
        self.native = self.header.platform == host.platform and self.header.jax == toolchain_version(host.platform)
        if self.native:
            self._run = _open_native(host, envelope.section("native"), devices, source)
        else:
            compilations.record(name)
            logger().info("%s: compiled here from its portable program", name)
            with told(None):  # one compilation, whatever its result
                made = compile_exported(envelope.section("export"), self.header, devices, source)
            self._run = made.runtime_executable()

    def run(self, arguments: Sequence[Any]) -> list[Any]:
        """Outputs, as arrays on the devices. Donated arguments are gone afterwards."""
        parts = self._run.execute_sharded(arguments).disassemble_into_single_device_arrays()
        if len(self._mesh.devices) == 1:
            return [part[0] for part in parts]
        from jax import make_array_from_single_device_arrays as joined

        return [
            joined(tensor.shape, sharding, part)
            for tensor, sharding, part in zip(self.header.outputs, self._shardings, parts, strict=True)
        ]


def _open_native(host: Host, data: memoryview, devices: Sequence[Any], source: str) -> Any:
    try:
        return host.load(bytes(data), devices)
    except Exception as e:
        raise ArtifactError(f"{source}: XLA cannot open the executable ({e}); compile the bundle again") from e
