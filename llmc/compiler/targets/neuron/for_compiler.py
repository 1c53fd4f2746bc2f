"""A portable module as neuronx-cc takes it: what is XLA's own there becomes what Neuron calls it.

- `topk` is the custom call AwsNeuronTopK, whose configuration is the number of values (nkipy, core/backend/hlo.py).
- A rank's own number, `replica-id`, is a constant; so such a module is another for each rank.
- Inputs and outputs have names for the NEFF, "input0", "input1" … and "output0" …: frontend attributes of parameters
  and of the result (torch-neuronx's modules, nkipy).
- Outputs that take an input's place must do so.

Fields by their numbers in xla/service/hlo.proto (openxla/xla at jaxlib 0.10.2), as in executors/neuron/files.py;
HloInstructionProto: 3 shape, 8 literal, 9 parameter_number, 28 custom_call_target, 35 id, 43 backend_config,
50 custom_call_has_side_effect, 68 frontend_attributes, 77 custom_call_api_version, 81 k, 85 largest.
"""

from __future__ import annotations

from llmc.compiler.targets.xla.hlo_ids import COMPUTATIONS, ID, INSTRUCTIONS, ROOT_ID
from llmc.runtime.executors.neuron.files import NeuronFile
from llmc.runtime.executors.xla import wire

TOP_K = "AwsNeuronTopK"

_OPCODE, _SHAPE, _LITERAL, _PARAMETER, _TARGET, _CONFIG = 2, 3, 8, 9, 28, 43
_ATTRIBUTES, _K, _LARGEST = 68, 81, 85
_ALIASES, _ENTRY = 8, 6
_COMPUTATION_ID = 5
_MUST = 2


def modules(file: NeuronFile) -> list[bytes]:
    """The modules for neuronx-cc: one for all ranks, or one for each."""
    ranks = range(file.header.devices) if "replica-id" in file.module.operators else range(1)
    return [_module(file.hlo, rank, len(file.module.outputs)) for rank in ranks]


def _module(hlo: bytes, rank: int, outputs: int) -> bytes:
    entry = next((value for number, _, value in wire.fields(hlo) if number == _ENTRY), 0)
    out = bytearray()
    for number, kind, value in wire.fields(hlo):
        made = value
        if number == COMPUTATIONS:
            made = _computation(wire.as_bytes(value), rank, entry, outputs)
        elif number == _ALIASES:
            made = _must(wire.as_bytes(value))
        out += wire.field(number, made, kind)
    return bytes(out)


def _computation(message: bytes, rank: int, entry: int | bytes, outputs: int) -> bytes:
    listed = list(wire.fields(message))
    is_entry = next((value for number, _, value in listed if number == _COMPUTATION_ID), 0) == entry
    root = next((value for number, _, value in listed if number == ROOT_ID), 0) if is_entry else None
    return b"".join(
        wire.field(n, _instruction(wire.as_bytes(v), rank, is_entry, root, outputs) if n == INSTRUCTIONS else v, k)
        for n, k, v in listed
    )


def _instruction(message: bytes, rank: int, is_entry: bool, root: int | bytes | None, outputs: int) -> bytes:
    found = {number: value for number, _, value in wire.fields(message)}
    opcode, left_out, added = found.get(_OPCODE), set[int](), b""
    if opcode == b"topk":
        left_out = {_OPCODE, _K, _LARGEST}
        added = (
            wire.field(_OPCODE, b"custom-call") + wire.field(_TARGET, TOP_K.encode())
            + wire.field(_CONFIG, str(int(found[_K])).encode())
        )  # fmt: skip
    elif opcode == b"replica-id":
        left_out = {_OPCODE}
        literal = wire.field(1, found[_SHAPE]) + wire.field(6, wire.varint(rank))  # LiteralProto: shape, u32s
        added = wire.field(_OPCODE, b"constant") + wire.field(_LITERAL, literal)
    elif opcode == b"parameter" and is_entry:
        left_out = {_ATTRIBUTES}
        added = _attribute("neff_input_names", f"input{int(found.get(_PARAMETER, 0))}")
    elif is_entry and found.get(ID) == root:
        left_out = {_ATTRIBUTES}
        added = _attribute("neff_output_names", ",".join(f"output{i}" for i in range(outputs)))
    kept = b"".join(wire.field(n, v, k) for n, k, v in wire.fields(message) if n not in left_out)
    return kept + added


def _attribute(name: str, value: str) -> bytes:
    """The field of frontend attributes, a map of which this is the one entry."""
    return wire.field(_ATTRIBUTES, wire.field(1, wire.field(1, name.encode()) + wire.field(2, value.encode())))


def _must(config: bytes) -> bytes:
    """HloInputOutputAliasProto whose entries (1) are of kind (4) MUST_ALIAS."""
    return b"".join(
        wire.field(
            1, b"".join(wire.field(n, _MUST if n == 4 else v, k) for n, k, v in wire.fields(wire.as_bytes(entry)))
        )
        for _, _, entry in wire.fields(config)
    )
