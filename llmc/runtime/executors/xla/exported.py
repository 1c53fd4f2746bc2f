"""From a portable program (a `jax.export` blob) to a native executable: at compile time, and on a host of another
version or without the device, where nothing else opens.

A blob is StableHLO under JAX's own compatibility promise (six months back, three weeks ahead); opening it reads a
flatbuffer and MLIR bytecode, and runs nothing. Source: JAX's documentation of `jax.export`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from llmc.errors import ArtifactError
from llmc.runtime.executors.xla.client import platform_of
from llmc.runtime.executors.xla.envelope import AXIS, StepHeader, Tensor


def mesh_of(devices: Sequence[Any]) -> Any:
    """The mesh of one axis over which graphs are sharded."""
    import numpy as np
    from jax.sharding import Mesh

    return Mesh(np.array(list(devices)), (AXIS,))


def sharding_of(mesh: Any, tensor: Tensor) -> Any:
    """Where a tensor's parts lie."""
    from jax.sharding import NamedSharding, PartitionSpec

    return NamedSharding(mesh, PartitionSpec(*tensor.dims))


def compile_exported(
    blob: bytes | memoryview,
    header: StepHeader,
    devices: Sequence[Any],
    source: str,
    options: Mapping[str, str | int | bool] = MappingProxyType({}),
) -> Any:
    """Compile a portable program for `devices` (of this host, or only described) with XLA's `options`:
    jax.stages.Compiled.

    Raises ArtifactError when this JAX cannot read the blob.
    """
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
