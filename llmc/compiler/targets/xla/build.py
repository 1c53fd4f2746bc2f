"""Builds an executable file from a function: exported as StableHLO, compiled for present or described devices,
analysed.

In addition to inputs and outputs, the file's header holds XLA's analysis:

    memory       bytes on one device: {"arguments", "outputs", "aliased", "temporary", "code"}; code is the whole file
                 of the executable where XLA does not count it, as on GPUs
    cost         one device's work: {"flops"} of matmuls, {"xla_flops", "xla_bytes_accessed"} as XLA counts them, which
                 counts the body of a loop once
    collectives  {kind: {"count", "bytes", …}}, see collectives.py; empty on one device
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import export

from llmc.compiler.targets.xla.collectives import collectives
from llmc.errors import CompileError
from llmc.runtime.executors.envelope import write_envelope
from llmc.runtime.executors.xla.client import Platform, open_client, toolchain_version
from llmc.runtime.executors.xla.envelope import FORM, StepHeader, Tensor
from llmc.runtime.executors.xla.programs import compile_exported, mesh_of, sharding_of

ANALYSIS = ("memory", "cost", "collectives")
"""Header members from `analyse`."""

EXPORT_PLATFORMS = ("cpu", "tpu", "cuda")
"""The platforms that portable programs are always lowered for."""


_RESULTS = {"step": ("logits", "top_values", "top_ids"), "encode": ("result",)}
"""Names of outputs that correspond to no donated input, by job kind."""


@dataclass(frozen=True)
class Machine:
    """The compile target: `devices` that one graph is sharded over, of this host or described.

    `compiler_options`: XLA's options for it, by name.
    """

    platform: Platform
    topology: str
    devices: tuple[Any, ...]
    compiler_options: Mapping[str, str | int | bool] = field(default_factory=dict)


@dataclass(frozen=True)
class XlaJob:
    """A function over arrays, its inputs, and those that it may update in place (`donated`).

    The results for donated inputs are its last outputs, in order.
    """

    kind: Literal["step", "slots", "encode"]
    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    donated: tuple[int, ...]
    name: str
    native: Callable[..., Any] | None = None
    """The same function for this machine only, with kernels that no portable program has."""


def host_machine(devices: int, threads: int | None) -> Machine:
    """Describe this host's CPU as so many devices. Raises DeviceError."""
    return Machine("cpu", "cpu", tuple(open_client("cpu", devices, threads)))


def build(job: XlaJob, machine: Machine) -> bytes:
    """Build the executable file. Raises CompileError."""
    shaped, outputs, function = jitted(job, machine)
    header = StepHeader(
        machine.platform, machine.topology, len(machine.devices), toolchain_version(machine.platform), job.kind,
        job.inputs, outputs,
        tuple((len(outputs) - len(job.donated) + i, given) for i, given in enumerate(job.donated)),
    )  # fmt: skip
    try:
        flops = matmul_flops(function.trace(*shaped).jaxpr)
        portable = bytes(export.export(function, platforms=EXPORT_PLATFORMS)(*shaped).serialize())
        if job.native is None:
            compiled = compile_exported(portable, header, machine.devices, job.name, machine.compiler_options)
        else:
            compiled = _compile_native(job, job.native, machine)
        native = compiled.runtime_executable().serialize()
    except CompileError:
        raise
    except Exception as e:
        raise CompileError(f"XLA cannot compile {job.name} for {machine.topology}: {first_lines(e)}") from e
    analysis = analyse(compiled, flops, len(machine.devices), len(native))
    _require_in_place(job, analysis["memory"], machine)
    return write_envelope({**header.to_json(), **analysis}, {"native": native, "export": portable}, FORM)


def _compile_native(job: XlaJob, native: Callable[..., Any], machine: Machine) -> Any:
    shaped, _, function = jitted(replace(job, function=native), machine, job.donated)
    lowered = function.trace(*shaped).lower(lowering_platforms=(machine.platform,))
    return lowered.compile(compiler_options=dict(machine.compiler_options))


def stablehlo(job: XlaJob, machine: Machine) -> str:
    """Return the function as StableHLO, before XLA compiles it. Raises CompileError."""
    shaped, _, function = jitted(job, machine)
    try:
        return str(function.lower(*shaped).as_text())
    except Exception as e:
        raise CompileError(f"JAX cannot lower {job.name}: {first_lines(e)}") from e


def jitted(job: XlaJob, machine: Machine, donated: tuple[int, ...] = ()) -> tuple[list[Any], tuple[Tensor, ...], Any]:
    """Return input shapes, outputs, and the function over the mesh, which may change `donated` inputs."""
    mesh = mesh_of(machine.devices)
    shaped = [jax.ShapeDtypeStruct(t.shape, jnp.dtype(t.dtype), sharding=sharding_of(mesh, t)) for t in job.inputs]
    outputs = _outputs(job, shaped)
    sharded = tuple(sharding_of(mesh, t) for t in outputs)
    function = jax.jit(job.function, keep_unused=True, donate_argnums=donated, out_shardings=sharded)
    return shaped, outputs, function


def _outputs(job: XlaJob, shaped: Sequence[Any]) -> tuple[Tensor, ...]:
    """Outputs by shape; those of donated inputs have their sharding, others are replicated."""
    built = jax.eval_shape(job.function, *shaped)
    first = len(built) - len(job.donated)
    given = dict(enumerate(job.donated, first))
    found = []
    for i, out in enumerate(built):
        if i in given:
            found.append(job.inputs[given[i]])
        elif job.kind == "slots":  # the rows of slot_read have the cache's sharding
            dims = job.inputs[i].dims
            found.append(Tensor(f"row{i}", out.shape, str(out.dtype), dims[:1] + dims[2:]))
        else:
            found.append(Tensor(_RESULTS[job.kind][i], out.shape, str(out.dtype), (None,) * len(out.shape)))
    return tuple(found)


def analyse(compiled: Any, flops: int, devices: int, size: int) -> dict[str, Any]:
    """Analyse an executable of `size` bytes (module docstring); `flops` are those of all devices."""
    memory = compiled.memory_analysis()
    cost = compiled.cost_analysis() or {}
    return {
        "memory": {
            "arguments": int(memory.argument_size_in_bytes), "outputs": int(memory.output_size_in_bytes),
            "aliased": int(memory.alias_size_in_bytes), "temporary": int(memory.temp_size_in_bytes),
            "code": int(memory.generated_code_size_in_bytes) or size,
        },
        "cost": {
            "flops": -(-flops // devices), "xla_flops": int(cost.get("flops", 0)),
            "xla_bytes_accessed": int(cost.get("bytes accessed", 0)),
        },
        "collectives": collectives(compiled.as_text()) if devices > 1 else {},
    }  # fmt: skip


def _require_in_place(job: XlaJob, memory: dict[str, int], machine: Machine) -> None:
    """Raise CompileError where XLA did not reuse a donated input's memory for its output."""
    wanted = sum(share_bytes(job.inputs[i], len(machine.devices)) for i in job.donated)
    if memory["aliased"] < wanted:
        raise CompileError(
            f"{job.name}: XLA updates {memory['aliased']:,} bytes of the cache in place, of {wanted:,}, and would copy "
            "the rest in every step"
        )


def share_bytes(tensor: Tensor, devices: int) -> int:
    """Return the bytes of a tensor on one device."""
    size = jnp.dtype(tensor.dtype).itemsize
    for length, dim in zip(tensor.shape, tensor.dims, strict=True):
        size *= length if dim is None else -(-length // devices)
    return size


def first_lines(error: Exception) -> str:
    """Join an error's first three lines."""
    return " ".join(str(error).split("\n")[:3])[:600]


def matmul_flops(jaxpr: Any) -> int:
    """Sum 2 · B · M · N · K of each `dot_general` of a (closed) jaxpr; a scan's body counts once per iteration.

    XLA's own count takes the body of a loop once, and a step of rolled layers is mostly loop.
    """
    total = 0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += 2 * math.prod(out) * math.prod(left[d] for d in contracted)
            continue
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for value in equation.params.values():
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                total += times * matmul_flops(value)
    return total
