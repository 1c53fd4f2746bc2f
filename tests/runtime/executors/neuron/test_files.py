"""HLO modules that come from anywhere: what XLA is never handed."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.errors import ArtifactError
from llmc.runtime.executors.neuron.files import HloModule

PLAIN = """HloModule m, input_output_alias={ {1}: (1, {}, may-alias) }

ENTRY main {
  x = f32[3,40]{1,0} parameter(0)
  y = s32[2]{0} parameter(1)
  ROOT out = (f32[3,40]{1,0}, s32[2]{0}) tuple(x, y)
}
"""
LESS = """
less {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = pred[] compare(a, b), direction=LT
}
"""


def proto(text: str) -> bytes:
    from jaxlib import _hlo

    return bytes(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())


def test_what_it_takes_and_gives_is_read() -> None:
    module = HloModule.parse(proto(PLAIN), "m")

    assert module.inputs == (("float32", (3, 40)), ("int32", (2,)))
    assert module.outputs == module.inputs
    assert module.aliases == ((1, 1),)
    assert module.operators == {"parameter", "tuple"}


@pytest.mark.parametrize(
    ("was", "then", "message"),
    [
        ("x = f32[3,40]{1,0} parameter(0)\n", "z = f32[3,40]{1,0} parameter(0)\n  x = f32[3,40]{1,0} "
         'custom-call(z), custom_call_target="xla_python_cpu_callback"\n', "operator 'custom-call'"),
        ("x = f32[3,40]{1,0} parameter(0)\n", "z = f32[3,40]{1,0} parameter(0)\n  x = f32[3,40]{1,0} "
         "sort(z), dimensions={1}, to_apply=less\n", "operator 'sort'"),
        ("f32[3,40]", "f64[3,40]", "elements of type 12"),
        ("s32[2]", "s64[2]", "elements of type 5"),
        ("f32[3,40]{1,0}", "f32[3,<=40]{1,0}", "dynamic dimension"),
        ("{1}: (1, {}, may-alias)", "{0}: (1, {}, may-alias)", "output 0 does not fit the memory of input 1"),
    ],
)  # fmt: skip
def test_what_a_neuron_core_or_this_process_must_not_be_given_is_refused(was: str, then: str, message: str) -> None:
    text = PLAIN.replace(was, then).replace("\nENTRY", (LESS if "sort(" in then else "") + "\nENTRY")
    with pytest.raises(ArtifactError, match=f"m: not an HLO module of llmc .*{re.escape(message)}.*compile it again"):
        HloModule.parse(proto(text), "m")


@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_module_or_an_error(data: bytes) -> None:
    with pytest.raises(ArtifactError):
        HloModule.parse(data, "m")


@given(at=st.integers(0, 400), byte=st.integers(0, 255))
def test_a_damaged_module_is_read_or_an_error(at: int, byte: int) -> None:
    data = bytearray(proto(PLAIN))
    data[at % len(data)] = byte
    with contextlib.suppress(ArtifactError):
        HloModule.parse(bytes(data), "m")
