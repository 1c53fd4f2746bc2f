"""A bundle's programs: compiles portable ones (`jax.export` blobs), and opens executables on this host.

A blob is StableHLO under JAX's compatibility promise (six months back, three weeks ahead; JAX's documentation of
`jax.export`). Opening it reads a flatbuffer and MLIR bytecode, and runs nothing. It is compiled at compile time, and on
a host with another version or without the device. An executable is opened from PJRT's own serialisation, machine code
and its description, and run without tracing: only after its digest was checked against the manifest, and from a remote
store only if the manifest is signed (reliability: P3, P12, P15). Nothing here unpickles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from llmc.artifacts.log import logger
from llmc.errors import ArtifactError
from llmc.runtime.executors.envelope import ExecutableFile
from llmc.runtime.executors.xla.client import platform_of, reporting, toolchain_version
from llmc.runtime.executors.xla.envelope import AXIS, FORM, StepHeader, Tensor

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.compilations import CompilationCounter
    from llmc.runtime.executors.xla.hosts import PlatformHost


class LoadedProgram:
    """One program of a bundle, ready to run. `header` describes its inputs and outputs."""

    def __init__(
        self,
        bundle: Bundle,
        file: str,
        name: str,
        host: PlatformHost,
        devices: Sequence[Any],
        compilations: CompilationCounter,
    ) -> None:
        """Load a file of the bundle; `name` is for messages.

        The native section is opened if it is of this JAX and of `host`'s platform. Otherwise the portable one is
        compiled and counted. Raises ArtifactError if neither can be opened.
        """
        source = f"{bundle.path}: {name}"
        bundle.files.require_native(name)
        envelope = ExecutableFile.parse(bundle.files.read(file), source, FORM)
        self.header = StepHeader.parse(envelope.header, source)
        mesh = mesh_of(devices)
        self._shardings = [sharding_of(mesh, t) for t in self.header.outputs]
        self._alone = len(devices) == 1
        self.native = self.header.platform == host.platform and self.header.jax == toolchain_version(host.platform)
        if self.native:
            self._run = _open_native(host, envelope.section("native"), devices, source)
        else:
            compilations.record(name)
            logger().info("%s: compiled here from its portable program", name)
            with reporting(None):  # one compilation, whatever its result
                built = compile_exported(envelope.section("export"), self.header, devices, source)
            self._run = built.runtime_executable()

    def run(self, arguments: Sequence[Any]) -> list[Any]:
        parts = self._run.execute_sharded(arguments).disassemble_into_single_device_arrays()
        if self._alone:
            return [part[0] for part in parts]
        return joined(self.header.outputs, self._shardings, parts)


def joined(tensors: Sequence[Tensor], shardings: Sequence[Any], parts: Sequence[Any]) -> list[Any]:
    """The arrays of a program's outputs, of each device's parts."""
    from jax import make_array_from_single_device_arrays as whole

    return [whole(t.shape, sharding, part) for t, sharding, part in zip(tensors, shardings, parts, strict=True)]


def _open_native(host: PlatformHost, data: memoryview, devices: Sequence[Any], source: str) -> Any:
    try:
        return host.load(bytes(data), devices)
    except Exception as e:
        raise ArtifactError(f"{source}: XLA cannot open the executable ({e}); compile the bundle again") from e


def mesh_of(devices: Sequence[Any]) -> Any:
    """The one-axis mesh over which graphs are sharded."""
    import numpy as np
    from jax.sharding import Mesh

    return Mesh(np.array(list(devices)), (AXIS,))


def sharding_of(mesh: Any, tensor: Tensor) -> Any:
    """The sharding of a tensor."""
    from jax.sharding import NamedSharding, PartitionSpec

    return NamedSharding(mesh, PartitionSpec(*tensor.dims))


def compile_exported(
    blob: bytes | memoryview,
    header: StepHeader,
    devices: Sequence[Any],
    source: str,
    options: Mapping[str, str | int | bool] = MappingProxyType({}),
) -> Any:
    """Compile a portable program for real or described `devices`: jax.stages.Compiled. Raises ArtifactError."""
    import jax
    from jax import export

    try:
        program = export.deserialize(bytearray(blob))
    except Exception as e:
        raise ArtifactError(
            f"{source}: this jax ({jax.__version__}) cannot read the portable program, made by jax {header.jax} ({e}); "
            "compile the bundle again"
        ) from e
    mesh = mesh_of(devices)
    shaped = [
        jax.ShapeDtypeStruct(t.shape, jax.numpy.dtype(t.dtype), sharding=sharding_of(mesh, t)) for t in header.inputs
    ]
    donated = tuple(given for _, given in header.donated)
    function = jax.jit(
        program.call, donate_argnums=donated, keep_unused=True,
        out_shardings=tuple(sharding_of(mesh, t) for t in header.outputs),
    )  # fmt: skip
    lowered = function.trace(*shaped).lower(lowering_platforms=(platform_of(devices),))
    return lowered.compile(compiler_options=dict(options) or None)
