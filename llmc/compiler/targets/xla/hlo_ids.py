"""Small instruction numbers for a serialised HLO module, which compilers built on an older XLA need.

Since 2025 XLA numbers instructions with 64 bits, their computation's number in the upper half; what is built on an XLA
from before (neuronx-cc) refuses a number above INT_MAX. Source: openxla/xla 5bba026, pytorch/xla#9685. Numbers only
have to be unique within a module, so all are given anew, from 1. Fields by their numbers in xla/service/hlo.proto:

    HloModuleProto       3 computations, 5 id
    HloComputationProto  2 instructions, 6 root_id
    HloInstructionProto  35 id, 36 operand_ids, 37 control_predecessor_ids

The module's own number counts the modules of a process from 0, and is left out, as 0 is, so that equal modules are
equal bytes. Modules that are scheduled already hold numbers elsewhere, too, and are none that llmc writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

COMPUTATIONS, MODULE_ID, INSTRUCTIONS, ROOT_ID, ID = 3, 5, 2, 6, 35
REFERENCES = (36, 37)

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SIZES = {_FIXED64: 8, _FIXED32: 4}

Change = Callable[[int, "int | bytes"], "int | bytes | None"]


def renumbered(module: bytes) -> bytes:
    """The HloModuleProto `module` with instructions numbered from 1. Raises ValueError for what is not one."""
    try:
        found = [
            next((number for inner, _, number in _fields(_bytes(instruction)) if inner == ID), 0)
            for field, _, computation in _fields(module)
            if field == COMPUTATIONS
            for within, _, instruction in _fields(_bytes(computation))
            if within == INSTRUCTIONS
        ]
        numbers = {old: new for new, old in enumerate(found, 1)}
        if len(numbers) != len(found):
            raise ValueError("two instructions have one number")

        def in_instruction(field: int, value: int | bytes) -> int | bytes:
            if field == ID and isinstance(value, int):
                return numbers[value]
            if field in REFERENCES:
                listed = [value] if isinstance(value, int) else _varints(value)
                made = [numbers[number] for number in listed]
                return made[0] if isinstance(value, int) else b"".join(map(_varint, made))
            return value

        def in_computation(field: int, value: int | bytes) -> int | bytes:
            if field == ROOT_ID and isinstance(value, int):
                return numbers[value]
            return _changed(_with(_bytes(value), ID), in_instruction) if field == INSTRUCTIONS else value

        def in_module(field: int, value: int | bytes) -> int | bytes | None:
            if field == MODULE_ID:
                return None
            return _changed(_with(_bytes(value), ROOT_ID), in_computation) if field == COMPUTATIONS else value

        return _changed(module, in_module)
    except (IndexError, KeyError, TypeError) as e:
        raise ValueError(f"not an HLO module ({type(e).__name__}: {e})") from e


def _changed(message: bytes, change: Change) -> bytes:
    """`message` with each field's value as `change` makes it of field number and value; None leaves the field out."""
    out = bytearray()
    for field, kind, value in _fields(message):
        made = change(field, value)
        if made is None:
            continue
        out += _varint(field << 3 | kind)
        if isinstance(made, int):
            out += _varint(made)
        else:
            out += (_varint(len(made)) if kind == _BYTES else b"") + made
    return bytes(out)


def _with(message: bytes, field: int) -> bytes:
    """`message` with `field`, a number that is 0 where it is left out."""
    there = any(number == field for number, _, _ in _fields(message))
    return message if there else message + _varint(field << 3 | _VARINT) + b"\0"


def _fields(message: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Number, wire type and value of each field: an integer for varints, bytes for all others."""
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        kind, size = tag & 7, 0
        if kind == _VARINT:
            value, at = _read_varint(message, at)
            yield tag >> 3, kind, value
            continue
        if kind == _BYTES:
            size, at = _read_varint(message, at)
        else:
            size = _SIZES[kind]
        if at + size > len(message):
            raise IndexError("a field ends behind its message")
        yield tag >> 3, kind, message[at : at + size]
        at += size


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _varints(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _read_varint(data, at)
        yield value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise TypeError("a number where a message should be")
    return value
