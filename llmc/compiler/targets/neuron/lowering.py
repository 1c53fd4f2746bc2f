"""Lowers a bucket's step to one rank's HLO module, which neuronx-cc reads and XLA runs on any CPU.

With several ranks, XLA's own partitioner divides the step, as for the xla target. The module is taken after
partitioning, before XLA's CPU passes. Its ranks are replicas, so that NeuronCores run them as processes of a group
(neuronx-distributed's way); a rank's number is the operator `replica-id`, if the module needs it.

neuronx-cc supports no calls, loops or sort ("NCC_EVRF029: Operation sort is not supported on trn2"). Functions are
therefore inlined, rows are written one by one (xla/step.py), and the largest logits are the operator `topk` over pieces
of at most PIECE tokens. Source: Neuron SDK documentation, compiler error codes. PIECE is below what public reports call
compilable (rows of 16,384), and was not tried on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from llmc.artifacts.temporaries import temporary_folder
from llmc.compiler.targets.xla.build import Machine, XlaJob, first_lines, jitted
from llmc.compiler.targets.xla.hlo_ids import changed, renumbered
from llmc.compiler.targets.xla.step import Array, Core, CoreOutput, Given, Read
from llmc.errors import ArtifactError, CompileError
from llmc.runtime.executors.neuron.files import NeuronFile, write_portable
from llmc.runtime.executors.xla import wire
from llmc.runtime.executors.xla.client import toolchain_version
from llmc.runtime.executors.xla.envelope import StepHeader

PIECE = 8192
"""Vocabulary tokens of one `topk`."""

OPCODE, SHARDING = 2, 40
SHARDINGS = (12, 14, 15)
"""Fields of HloModuleProto: spmd_output_sharding, spmd_parameters_shardings, device_assignment."""

_PASSES = "builtin.module(sccp,canonicalize,cse,symbol-dce)"
_CALLED = ("jaxpr", "call_jaxpr")
_PARTITIONED = "*.after_spmd-partitioning.*.hlo.pb"


class TopCore:
    """A core that finds the largest logits piece by piece; ties go to the lower id."""

    def __init__(self, core: Core, top_k: int) -> None:
        self.weights = core.weights
        self._core = core
        self._top_k = top_k

    def run(self, given: Given, read: Read, weights: Sequence[Array]) -> CoreOutput:
        out = self._core.run(given, read, weights)
        logits = out.logits.astype("float32")  # converted once, so that both results are rounded alike
        return out._replace(logits=logits, top=top_of_pieces(logits, self._top_k))


def top_of_pieces(logits: Array, top_k: int) -> tuple[Array, Array]:
    """Return the `top_k` largest of each row [B, V], and their ids."""
    import jax.numpy as jnp
    from jax import lax

    batch, size = logits.shape
    count = -(-size // PIECE)
    if count == 1 or 2 * top_k > PIECE:  # more rounds would not reduce the number of pieces
        values, ids = lax.top_k(logits, top_k)
        return values, ids
    width = -(-size // count)
    padded = jnp.pad(logits, ((0, 0), (0, count * width - size)), constant_values=-jnp.inf)
    values, ids = lax.top_k(padded.reshape(batch * count, width), min(top_k, width))
    ids = ids.reshape(batch, count, -1) + (jnp.arange(count, dtype=jnp.int32) * width)[:, None]
    best, offsets = top_of_pieces(values.reshape(batch, -1), top_k)
    return best, jnp.take_along_axis(ids.reshape(batch, -1), offsets, axis=1)


def lower(job: XlaJob, machine: Machine, chip: str) -> bytes:
    """Lower a step to its portable file. Raises CompileError."""
    import jax

    job = replace(job, function=_inlined(job.function))
    shaped, outputs, function = jitted(job, machine, job.donated)
    if len(machine.devices) == 1:  # a mesh would add custom calls
        shaped = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in shaped]
        function = jax.jit(job.function, keep_unused=True, donate_argnums=job.donated)
    try:
        lowered = function.trace(*shaped).lower(lowering_platforms=("cpu",))
        module = _cleaned(lowered.compiler_ir("stablehlo"))
        hlo = _module(module) if len(machine.devices) == 1 else _partitioned(module, machine.devices)
    except CompileError:
        raise
    except Exception as e:
        raise CompileError(f"JAX cannot lower {job.name} for {chip}: {first_lines(e)}") from e
    header = StepHeader(
        "neuron", chip, len(machine.devices), toolchain_version("cpu"), job.kind, job.inputs, outputs,
        tuple((len(outputs) - len(job.donated) + i, given) for i, given in enumerate(job.donated)),
    )  # fmt: skip
    data = write_portable(header, hlo)
    try:
        file = NeuronFile.parse(data, job.name)
    except ArtifactError as e:
        raise CompileError(f"{job.name} has no form that neuronx-cc takes: {e}") from e
    if file.module.aliases != header.donated:
        raise CompileError(f"{job.name}: the module updates {file.module.aliases} in place, not {header.donated}")
    return data


def running_sum(x: Array, axis: int) -> Array:
    """`lax.cumsum` without JAX's call: after round r each value is the sum of the last 2ʳ."""
    from jax import lax

    size, shift = x.shape[axis], 1
    while shift < size:
        before = lax.slice_in_dim(x, 0, size - shift, axis=axis)
        x = x + lax.pad(before, x.dtype.type(0), [(shift * (i == axis), 0, 0) for i in range(x.ndim)])
        shift *= 2
    return x


def _inlined(function: Callable[..., Any]) -> Callable[..., tuple[Array, ...]]:
    import jax
    from jax.extend import core

    def evaluate(jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))
        for equation in jaxpr.eqns:
            given = [v.val if isinstance(v, core.Literal) else known[v] for v in equation.invars]
            inner = next((equation.params[name] for name in _CALLED if name in equation.params), None)
            if equation.primitive.name == "cumsum" and not equation.params["reverse"]:
                results = [running_sum(given[0], equation.params["axis"])]
            elif inner is not None and hasattr(inner, "consts"):
                results = evaluate(inner.jaxpr, inner.consts, given)
            else:
                results = equation.primitive.bind(*given, **equation.params)
                results = results if equation.primitive.multiple_results else [results]
            known |= dict(zip(equation.outvars, results, strict=True))
        return [v.val if isinstance(v, core.Literal) else known[v] for v in jaxpr.outvars]

    def run(*arguments: Any) -> tuple[Array, ...]:
        closed = jax.make_jaxpr(function)(*arguments)
        return tuple(evaluate(closed.jaxpr, closed.consts, arguments))

    return run


def _cleaned(module: Any) -> bytes:
    from jax._src.interpreters import mlir
    from jaxlib.mlir.dialects import stablehlo
    from jaxlib.mlir.passmanager import PassManager

    with module.context:
        stablehlo.register_stablehlo_passes()
        PassManager.parse(_PASSES).run(module.operation)
        code: bytes = mlir.module_to_bytecode(module)
        return code


def _module(code: bytes) -> bytes:
    from jaxlib import _jax

    built = _jax.mlir.mlir_module_to_xla_computation(code, use_tuple_args=False, return_tuple=False)
    return renumbered(built.as_serialized_hlo_module_proto())


def _partitioned(code: bytes, devices: Sequence[Any]) -> bytes:
    import numpy as np
    from jaxlib import _jax

    with temporary_folder("hlo") as folder:
        options = _jax.CompileOptions()
        build = options.executable_build_options
        options.num_partitions = build.num_partitions = len(devices)
        build.use_spmd_partitioning = build.use_shardy_partitioner = True
        build.device_assignment = _jax.DeviceAssignment.create(np.arange(len(devices), dtype=np.int32).reshape(1, -1))
        options.env_option_overrides = [
            ("xla_dump_to", str(folder)), ("xla_dump_hlo_pass_re", "spmd-partitioning"),
            ("xla_dump_hlo_as_proto", True), ("xla_backend_optimization_level", 0),
            ("xla_llvm_disable_expensive_passes", True),
        ]  # fmt: skip
        devices[0].client.compile_and_load(code, _jax.DeviceList(tuple(devices)), options)
        (found,) = folder.glob(_PARTITIONED)
        ((_, _, module),) = (item for item in wire.fields(found.read_bytes()) if item[0] == 1)  # HloProto.hlo_module
    return renumbered(_replicated(wire.as_bytes(module)))


def _replicated(module: bytes) -> bytes:
    """A partition's module as a replica's: with its number, and without shardings."""

    def in_instruction(number: int, value: int | bytes) -> int | bytes | None:
        if number == OPCODE and value == b"partition-id":
            return b"replica-id"
        return None if number == SHARDING else value

    def in_module(number: int, value: int | bytes) -> int | bytes | None:
        return None if number in SHARDINGS else value

    return changed(module, in_module, in_instruction)
