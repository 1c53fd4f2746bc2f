"""Builds an executable file from a function: exported as StableHLO, compiled for present or described devices,
analysed.

In addition to inputs and outputs, the file's header holds XLA's analysis:

    memory       bytes on one device: {"arguments", "outputs", "aliased", "temporary", "code"}; code is the whole file
                 of the executable where XLA does not count it, as on GPUs
    cost         one device's work: {"flops"} of matmuls, {"xla_flops", "xla_bytes_accessed"} as XLA counts them, which
                 counts the body of a loop once
    collectives  {kind: {"count", "bytes", …}}; empty on one device

Collectives are counted in HLO text, the output of `compiled.as_text()`: computations, `NAME (parameters) -> shape {`,
of instructions, `%name = shape opcode(operands), attributes`, with shapes like `f32[3,1,64]{2,1,0:T(8,128)}` or tuples
of shapes (XLA's HloModule::ToString). Bytes are those of the result on one device, without a layout's padding. An
asynchronous collective, a pair of `…-start` and `…-done`, counts once. A collective in a loop's body counts once
however often the loop runs, and also under `in_loop`. Text that is not HLO has no collectives.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict

import jax
import jax.numpy as jnp
from jax import export

from llmc.errors import CompileError
from llmc.runtime.executors.envelope import write_envelope
from llmc.runtime.executors.xla.client import Platform, open_client, toolchain_version
from llmc.runtime.executors.xla.envelope import FORM, StepHeader, Tensor
from llmc.runtime.executors.xla.programs import compile_exported, mesh_of, sharding_of

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
"""The counted opcodes, in addition to their `-start` forms."""


class Collectives(TypedDict):
    """All collectives of one kind."""

    count: int
    bytes: int
    """Bytes of all results on one device."""
    in_loop: int
    """The part of `count` that is in a loop, and runs once an iteration."""


def collectives(hlo: str) -> dict[str, Collectives]:
    """Count each kind of collective that occurs in `hlo`, in the order of KINDS."""
    computations = _computations(hlo)
    looped = _looped(computations)
    found: dict[str, Collectives] = {}
    for computation, instructions in computations.items():
        for shape, opcode, _ in instructions:
            kind = opcode.removesuffix("-start")
            if kind in KINDS:
                row = found.setdefault(kind, {"count": 0, "bytes": 0, "in_loop": 0})
                row["count"] += 1
                row["bytes"] += sum(_bytes(array) for array in _ARRAY.finditer(_result(shape, opcode)))
                row["in_loop"] += computation in looped
    return {kind: found[kind] for kind in KINDS if kind in found}


_Instruction = tuple[str, str, str]
"""Shape, opcode, and the rest."""

_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?[\w.\-]+ = (.+)")
_OPCODE = re.compile(r"\s*([a-z][a-z0-9\-]*)\(")
_COMMENT = re.compile(r"/\*.*?\*/")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|(?:true|false|branch|called)_computations?)=(%?[\w.\-]+|\{[^}]*\})"
)
_ARRAY = re.compile(r"\b(?:(pred)|[a-z]+(\d+)\w*)\[([\d,<=]*)\]")


def _computations(hlo: str) -> dict[str, list[_Instruction]]:
    built: dict[str, list[_Instruction]] = {}
    current = built.setdefault("", [])
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            current = built.setdefault(header[1], [])
        elif instruction := _INSTRUCTION.match(line):
            text = _COMMENT.sub("", instruction[1])
            shape, rest = _shape_first(text)
            if opcode := _OPCODE.match(rest):
                current.append((shape, opcode[1], rest[opcode.end() :]))
    return built


def _shape_first(text: str) -> tuple[str, str]:
    depth = 0
    for index, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == " " and depth == 0:
            return text[:index], text[index:]
    return text, ""


def _looped(computations: dict[str, list[_Instruction]]) -> set[str]:
    """Bodies and conditions of loops, and all that they call."""
    every = [i for instructions in computations.values() for i in instructions]
    waiting = [name for _, opcode, rest in every if opcode == "while" for name in _called(rest)]
    looped: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in looped:
            looped.add(name)
            waiting += [called for _, _, rest in computations.get(name, []) for called in _called(rest)]
    return looped


def _called(rest: str) -> list[str]:
    return [name.strip(" %") for match in _CALLED.finditer(rest) for name in match[1].strip("{}").split(",")]


def _result(shape: str, opcode: str) -> str:
    """The result's part of an instruction's shape; `-start` returns (operands, results, contexts…), all-reduce's the
    result.
    """
    if not opcode.endswith("-start") or not shape.startswith("("):
        return shape
    if opcode == "all-reduce-start" and not shape.startswith("(("):
        return shape
    parts: list[str] = [""]
    depth = 0
    for character in shape[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts[1] if len(parts) > 1 else parts[0]


def _bytes(array: re.Match[str]) -> int:
    boolean, bits, dims = array.groups()
    elements = math.prod(int(d.lstrip("<=")) for d in dims.split(",") if d)
    return elements if boolean else -(-elements * int(bits) // 8)


ANALYSIS = ("memory", "cost", "collectives")
"""Header members from `analyse`."""

EXPORT_PLATFORMS = ("cpu", "tpu", "cuda")
"""The platforms that portable programs are always lowered for."""


_RESULTS = {"step": ("logits", "top_values", "top_ids"), "encode": ("result",)}
"""Names of outputs that correspond to no donated input, by job kind."""


@dataclass(frozen=True)
class Machine:
    """The compile target: `devices` that one graph is sharded over, of this host or described, and XLA's options."""

    platform: Platform
    topology: str
    devices: tuple[Any, ...]
    compiler_options: Mapping[str, str | int | bool] = field(default_factory=dict)


@dataclass(frozen=True)
class XlaJob:
    """A function, its inputs, and those that it may update in place, which are its last outputs, in order."""

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
            given, _, native_function = jitted(replace(job, function=job.native), machine, job.donated)
            lowered = native_function.trace(*given).lower(lowering_platforms=(machine.platform,))
            compiled = lowered.compile(compiler_options=dict(machine.compiler_options))
        native = compiled.runtime_executable().serialize()
    except CompileError:
        raise
    except Exception as e:
        raise CompileError(f"XLA cannot compile {job.name} for {machine.topology}: {first_lines(e)}") from e
    analysis = analyse(compiled, flops, len(machine.devices), len(native))
    _require_in_place(job, analysis["memory"], machine)
    return write_envelope({**header.to_json(), **analysis}, {"native": native, "export": portable}, FORM)


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
    """Those of donated inputs have their sharding, others are replicated."""
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
    """Sum 2 · B · M · N · K of each `dot_general` of a (closed) jaxpr; a scan's body counts once per iteration."""
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
