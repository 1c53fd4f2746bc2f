"""Renumbers a serialised HLO module with small instruction ids, which compilers built on an older XLA need.

Since 2025 XLA's instruction ids have 64 bits, with the computation's id in the upper half. Compilers built on an
earlier XLA (neuronx-cc) refuse ids above INT_MAX. Source: openxla/xla 5bba026, pytorch/xla#9685. Ids only have to be
unique within a module, so all are assigned again, from 1. Fields by their numbers in xla/service/hlo.proto:

    HloModuleProto       3 computations, 5 id
    HloComputationProto  2 instructions, 6 root_id
    HloInstructionProto  35 id, 36 operand_ids, 37 control_predecessor_ids

The module's own id counts the process's modules from 0, and is left out, as 0 is, so that equal modules are equal
bytes. Scheduled modules hold ids in further fields; llmc writes none.
"""

from __future__ import annotations

from collections.abc import Callable

from llmc.runtime.executors.xla import wire

COMPUTATIONS, MODULE_ID, INSTRUCTIONS, ROOT_ID, ID = 3, 5, 2, 6, 35
REFERENCES = (36, 37)

Change = Callable[[int, "int | bytes"], "int | bytes | None"]


def renumbered(module: bytes) -> bytes:
    """Renumber the instructions of an HloModuleProto from 1. Raises ValueError for anything else."""
    try:
        found = [
            next((number for inner, _, number in wire.fields(wire.as_bytes(instruction)) if inner == ID), 0)
            for field, _, computation in wire.fields(module)
            if field == COMPUTATIONS
            for within, _, instruction in wire.fields(wire.as_bytes(computation))
            if within == INSTRUCTIONS
        ]
        numbers = {old: new for new, old in enumerate(found, 1)}
        if len(numbers) != len(found):
            raise ValueError("two instructions have one number")

        def in_instruction(field: int, value: int | bytes) -> int | bytes:
            if field == ID and isinstance(value, int):
                return numbers[value]
            if field in REFERENCES:
                listed = [value] if isinstance(value, int) else wire.varints(value)
                built = [numbers[number] for number in listed]
                return built[0] if isinstance(value, int) else b"".join(map(wire.varint, built))
            return value

        def in_computation(field: int, value: int | bytes) -> int | bytes:
            if field == ROOT_ID and isinstance(value, int):
                return numbers[value]
            return _changed(_with(wire.as_bytes(value), ID), in_instruction) if field == INSTRUCTIONS else value

        def in_module(field: int, value: int | bytes) -> int | bytes | None:
            if field == MODULE_ID:
                return None
            return _changed(_with(wire.as_bytes(value), ROOT_ID), in_computation) if field == COMPUTATIONS else value

        return _changed(module, in_module)
    except (IndexError, KeyError, TypeError) as e:
        raise ValueError(f"not an HLO module ({type(e).__name__}: {e})") from e


def _changed(message: bytes, change: Change) -> bytes:
    """`message` with each field's value replaced by `change` of field number and value; None leaves the field out."""
    out = bytearray()
    for field, kind, value in wire.fields(message):
        built = change(field, value)
        if built is None:
            continue
        out += wire.field(field, built, kind)
    return bytes(out)


def _with(message: bytes, field: int) -> bytes:
    there = any(number == field for number, _, _ in wire.fields(message))
    return message if there else message + wire.field(field, 0)


def changed(module: bytes, in_module: Change, in_instruction: Change) -> bytes:
    """Change a module's fields and its instructions' by functions of number and value; None leaves one out."""

    def in_computation(number: int, value: int | bytes) -> int | bytes:
        return _changed(wire.as_bytes(value), in_instruction) if number == INSTRUCTIONS else value

    def within(number: int, value: int | bytes) -> int | bytes | None:
        if number == COMPUTATIONS:
            return _changed(wire.as_bytes(value), in_computation)
        return in_module(number, value)

    return _changed(module, within)
