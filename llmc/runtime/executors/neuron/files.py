"""The file of a Neuron executable: the container of envelope.py, with its own header.

    portable   "LLMCHLO1", section "hlo": the module, as data
    native     "LLMCNEF1", the same with "neff", or "neff.0", "neff.1", … if the ranks' differ: code

A header is StepHeader's, of platform "neuron"; `topology` is the chip ("trn2"). Its shapes are over all ranks; the
module is one rank's. A native header also has `target`, `lnc` and `compiler`: what it was compiled for and by.

A module is data that XLA compiles, here for the CPU. It is untrusted, so only the operators below reach XLA. A custom
call, above all, would call a function of this process by name or address. Field numbers are those of
xla/service/hlo.proto and xla/xla_data.proto (openxla/xla at jaxlib 0.10.2):

    HloModuleProto       3 computations, 4 host_program_shape, 8 input_output_alias
    HloComputationProto  2 instructions
    HloInstructionProto  2 opcode, 3 shape
    ProgramShapeProto    1 parameters, 2 result
    ShapeProto           2 element_type, 3 dimensions, 4 tuple_shapes, 6 is_dynamic_dimension
    HloInputOutputAliasProto  1 entries: 1 output_shape_index, 2 parameter_number
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmc.errors import ArtifactError
from llmc.runtime.executors.envelope import ExecutableFile, Form, write_envelope
from llmc.runtime.executors.xla import wire
from llmc.runtime.executors.xla.envelope import StepHeader, Tensor

HLO, NEFF = "hlo", "neff"
PORTABLE, NATIVE = Form(b"LLMCHLO1", "a Neuron program"), Form(b"LLMCNEF1", "a Neuron executable")

OPERATORS = frozenset({
    "abs", "add", "all-gather", "all-reduce", "all-to-all", "and", "bitcast-convert", "broadcast", "ceil", "clamp",
    "collective-permute", "compare", "concatenate", "constant", "convert", "copy", "cosine", "divide", "dot",
    "dynamic-slice", "dynamic-update-slice", "exponential", "exponential-minus-one", "floor", "gather",
    "get-tuple-element", "iota", "is-finite", "log", "log-plus-one", "logistic", "maximum", "minimum", "multiply",
    "negate", "not", "or", "pad", "parameter", "power", "reduce", "reduce-scatter", "remainder", "replica-id",
    "reshape", "reverse", "rsqrt", "select", "sign", "sine", "slice", "sqrt", "subtract", "tanh", "topk", "transpose",
    "tuple", "xor",
})  # fmt: skip
"""Operators that a module may use: no loop, branch, call, sort or custom call."""

ELEMENTS = {1: "pred", 4: "int32", 8: "uint32", 11: "float32", 16: "bfloat16"}
"""xla.PrimitiveType → name of the types that a module may use. No 64-bit types, because NeuronCores lack them."""

_TUPLE = 13

Argument = tuple[str, tuple[int, ...]]
"""Element type and shape."""


@dataclass(frozen=True)
class HloModule:
    """A module's inputs and outputs, as (type, shape), and the input that each output aliases."""

    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    aliases: tuple[tuple[int, int], ...]
    operators: frozenset[str]

    @classmethod
    def parse(cls, data: bytes, source: str) -> HloModule:
        """Parse a module. Raises ArtifactError, naming `source`, if it is invalid or contains something forbidden."""
        try:
            return cls._read(data)
        except (ValueError, IndexError, KeyError, TypeError, UnicodeDecodeError, RecursionError) as e:
            what = str(e) if isinstance(e, ValueError) else f"{type(e).__name__}: {e}"
            raise ArtifactError(
                f"{source}: not an HLO module of llmc ({what}); compile it again with `llmc compile`"
            ) from e

    @classmethod
    def _read(cls, data: bytes) -> HloModule:
        shape, aliases, operators = b"", b"", set()
        for number, _, value in wire.fields(data):
            if number == 3:
                operators |= set(_operators(wire.as_bytes(value)))
            elif number == 4:
                shape = wire.as_bytes(value)
            elif number == 8:
                aliases = wire.as_bytes(value)
        if foreign := sorted(operators - OPERATORS):
            raise ValueError(f"it has the operator {foreign[0]!r:.60}")
        if not operators:
            raise ValueError("it has no instructions")
        inputs = [_argument(wire.as_bytes(value)) for number, _, value in wire.fields(shape) if number == 1]
        results = [wire.as_bytes(value) for number, _, value in wire.fields(shape) if number == 2]
        outputs = [each for result in results for each in _results(result)]
        pairs = tuple(sorted(_aliases(aliases)))
        for output, given in pairs:
            if outputs[output] != inputs[given]:
                raise ValueError(f"its output {output} does not fit the memory of input {given}")
        return cls(tuple(inputs), tuple(outputs), pairs, frozenset(operators))


@dataclass(frozen=True)
class NeuronFile:
    """A parsed and checked file; `neffs` by rank, empty in a portable one."""

    header: StepHeader
    members: Mapping[str, Any]
    hlo: bytes
    module: HloModule
    neffs: tuple[memoryview, ...]

    @classmethod
    def parse(cls, data: bytes, source: str) -> NeuronFile:
        """Parse a file of either form; raises ArtifactError. Runs nothing of it."""
        form = NATIVE if data.startswith(NATIVE.magic[:-1]) else PORTABLE
        envelope = ExecutableFile.parse(data, source, form)
        header = StepHeader.parse(envelope.header, source)
        hlo = bytes(envelope.section(HLO))
        module = HloModule.parse(hlo, source)
        for what, tensors, found in (
            ("input", header.inputs, module.inputs),
            ("output", header.outputs, module.outputs),
        ):
            if [(t.dtype, share(t, header.devices)) for t in tensors] != list(found):
                raise ArtifactError(
                    f"{source}: damaged, or not made by llmc: an {what} of its module is not as its header says; "
                    "compile it again with `llmc compile`"
                )
        neffs = tuple(envelope.section(name) for name in sorted(envelope.names, key=_rank) if name != HLO)
        if form == NATIVE and len(neffs) not in (1, header.devices):
            raise ArtifactError(f"{source}: {len(neffs)} NEFFs for {header.devices} ranks; compile it again")
        return cls(header, envelope.header, hlo, module, neffs)


def write_portable(header: StepHeader, hlo: bytes) -> bytes:
    """The file of a module."""
    return write_envelope(header.to_json(), {HLO: hlo}, PORTABLE)


def write_native(file: NeuronFile, neffs: list[bytes], built: Mapping[str, Any]) -> bytes:
    """The file of a module and its NEFFs, one for all ranks or one each; `built` has `target`, `lnc` and `compiler`."""
    names = [NEFF] if len(neffs) == 1 else [f"{NEFF}.{rank}" for rank in range(len(neffs))]
    return write_envelope(
        {**file.header.to_json(), **built}, {HLO: file.hlo, **dict(zip(names, neffs, strict=True))}, NATIVE
    )


def share(tensor: Tensor, devices: int) -> tuple[int, ...]:
    """The shape of one rank's part."""
    return tuple(n if dim is None else n // devices for n, dim in zip(tensor.shape, tensor.dims, strict=True))


def share_bytes(tensor: Tensor, devices: int) -> int:
    """Bytes of one rank's part."""
    return math.prod(share(tensor, devices)) * (2 if tensor.dtype == "bfloat16" else 4)


def _rank(name: str) -> int:
    return int(name.partition(".")[2] or 0) if name.startswith(NEFF) else -1


def _operators(computation: bytes) -> Iterator[str]:
    for number, _, instruction in wire.fields(computation):
        if number != 2:
            continue
        opcode = ""
        for inner, _, value in wire.fields(wire.as_bytes(instruction)):
            if inner == 2:
                opcode = wire.as_bytes(value).decode("ascii")
            elif inner == 3:
                list(_results(wire.as_bytes(value)))  # raises for a forbidden shape
        yield opcode


def _results(shape: bytes) -> Iterator[Argument]:
    kind = next((value for number, _, value in wire.fields(shape) if number == 2), 0)
    if kind != _TUPLE:
        yield _argument(shape)
        return
    for number, _, value in wire.fields(shape):
        if number == 4:
            yield from _results(wire.as_bytes(value))


def _argument(shape: bytes) -> Argument:
    kind, sizes = 0, list[int]()
    for number, _, value in wire.fields(shape):
        if number == 2 and isinstance(value, int):
            kind = value
        elif number == 3:
            sizes += [value] if isinstance(value, int) else wire.varints(value)
        elif number == 6 and any([value] if isinstance(value, int) else wire.varints(value)):
            raise ValueError("it has a dynamic dimension")
    if kind not in ELEMENTS:
        raise ValueError(f"it has elements of type {kind} (xla.PrimitiveType)")
    if any(size >= 1 << 40 for size in sizes):
        raise ValueError("it has a dimension that is too large for any device")
    return ELEMENTS[kind], tuple(sizes)


def _aliases(config: bytes) -> Iterator[tuple[int, int]]:
    for number, _, entry in wire.fields(config):
        if number != 1:
            continue
        output, given = list[int](), 0
        for inner, _, value in wire.fields(wire.as_bytes(entry)):
            if inner == 1:
                output += [value] if isinstance(value, int) else wire.varints(value)
            elif inner == 2 and isinstance(value, int):
                given = value
        yield (output or [0])[0], given
