from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.compiler.targets.xla.hlo_ids import renumbered

TEXT = """HloModule small

add { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(a, b) }

ENTRY main { x = f32[8] parameter(0)
  zero = f32[] constant(0)
  total = f32[] reduce(x, zero), dimensions={0}, to_apply=add
  ROOT out = (f32[], f32[8]) tuple(total, x) }
"""


def varint(value: int) -> bytes:
    return bytes([value & 0x7F | 0x80]) + varint(value >> 7) if value > 0x7F else bytes([value])


def field(number: int, value: int | bytes) -> bytes:
    tag = varint(number << 3 | (2 if isinstance(value, bytes) else 0))
    return tag + (varint(len(value)) + value if isinstance(value, bytes) else varint(value))


def instruction(number: int, *operands: int, packed: bool = True) -> bytes:
    listed = field(36, b"".join(map(varint, operands))) if packed else b"".join(field(36, n) for n in operands)
    return field(2, field(1, b"name") + field(35, number) + (listed if operands else b""))


def module(*computations: bytes, number: int | None = 7) -> bytes:
    own = b"" if number is None else field(5, number)
    return field(1, b"small") + b"".join(field(3, c) for c in computations) + own


def test_numbers_become_small_wherever_they_are_used() -> None:
    large = 5 << 32
    first = instruction(large + 1) + instruction(large + 2, large + 1) + field(5, 5) + field(6, large + 2)
    second = instruction(1 << 40) + field(6, 1 << 40)
    assert renumbered(module(first, second)) == module(
        instruction(1) + instruction(2, 1) + field(5, 5) + field(6, 2), instruction(3) + field(6, 3), number=None
    )


def test_lists_are_read_however_they_are_written() -> None:
    found = renumbered(module(instruction(9) + instruction(8, 9, 9, packed=False) + field(6, 8)))
    assert found == module(instruction(1) + instruction(2, 1, 1, packed=False) + field(6, 2), number=None)


def test_a_number_that_is_left_out_is_0() -> None:
    nameless = field(2, field(1, b"name"))
    assert renumbered(module(nameless + instruction(4, 0))) == module(
        field(2, field(1, b"name") + field(35, 1)) + instruction(2, 1) + field(6, 1), number=None
    )


def test_fields_that_are_not_numbers_of_instructions_stay() -> None:
    other = field(7, b"\x01\x02") + varint(9 << 3 | 1) + bytes(range(8)) + varint(9 << 3 | 5) + b"abcd"
    assert renumbered(other) == other


def test_xla_reads_the_same_module_in_what_comes_out() -> None:
    pytest.importorskip("jax")
    from jaxlib import _hlo

    text = _hlo.XlaComputation(_hlo.hlo_module_from_text(TEXT).as_serialized_hlo_module_proto()).as_hlo_text()
    proto = renumbered(_hlo.hlo_module_from_text(TEXT).as_serialized_hlo_module_proto())
    assert _hlo.XlaComputation(proto).as_hlo_text() == text
    assert renumbered(proto) == proto


@pytest.mark.parametrize(
    "data",
    [
        b"\x80",
        field(3, b"abc")[:-1],
        field(3, 5),
        module(instruction(1, 2)),
        module(instruction(1) + instruction(1)),
        module(field(6, 3)),
        varint(1 << 3 | 3),
    ],
)
def test_what_is_no_module_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"not an HLO module|have one number"):
        renumbered(data)


@given(st.binary(max_size=100))
def test_any_bytes_are_renumbered_or_a_value_error(data: bytes) -> None:
    try:
        renumbered(data)
    except ValueError:
        return
