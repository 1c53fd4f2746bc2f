"""The header of an XLA executable: read as written, refused when it is anything else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.errors import ArtifactError
from llmc.runtime.executors.envelope import ExecutableFile, write_envelope
from llmc.runtime.executors.xla.envelope import FORM, StepHeader, Tensor

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=5,
)

CACHE = Tensor("keys", (30, 10, 4, 64, 16), "bfloat16", (None, None, "tp", None, None))
STEP = StepHeader(
    platform="tpu", topology="v5e:2x2", devices=4, jax="0.10.2 0.10.2", kind="step",
    inputs=(Tensor("token_ids", (4, 1), "int32", (None, None)), CACHE),
    outputs=(Tensor("logits", (4, 100), "float32", (None, None)), CACHE),
    donated=((1, 1),),
)  # fmt: skip


def test_the_description_of_a_step_is_read_as_it_was_written() -> None:
    file = write_envelope({**STEP.to_json(), "bucket": [4, 1, 64]}, {}, FORM)
    assert StepHeader.parse(ExecutableFile.parse(file, "decode.xla", FORM).header, "decode.xla") == STEP


TENSOR = {"name": "x", "shape": [8], "dtype": "int32", "dims": [None]}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"platform": "rocm"}, "'platform' must be one of cpu, tpu, cuda"),
        ({"platform": ["cpu"]}, "'platform' must be one of"),
        ({"kind": None}, "'kind' must be one of step, slots"),
        ({"topology": 3}, "'topology' must be a string"),
        ({"jax": None}, "'jax' must be a string"),
        ({"devices": 0}, "devices must be an integer from 1"),
        ({"devices": True}, "devices must be an integer"),
        ({"devices": 1.0}, "devices must be an integer"),
        ({"devices": 3}, r"inputs\[1\] has 4 to shard over 3 devices"),
        ({"inputs": {}}, "'inputs' must be a list"),
        ({"outputs": [3]}, r"outputs\[0\] must be an object"),
        ({"inputs": [TENSOR | {"name": ""}]}, r"inputs\[0\]\.name"),
        ({"inputs": [TENSOR | {"dtype": "object"}]}, r"inputs\[0\]\.dtype must be one of float32, bfloat16, int32"),
        ({"inputs": [TENSOR | {"dtype": []}]}, r"inputs\[0\]\.dtype"),
        ({"inputs": [TENSOR | {"shape": 8}]}, r"inputs\[0\]\.shape must be a list"),
        ({"inputs": [TENSOR | {"shape": [-1]}]}, r"inputs\[0\]\.shape must be an integer from 0"),
        ({"inputs": [TENSOR | {"shape": [2**60]}]}, r"inputs\[0\]\.shape must be an integer from 0"),
        ({"inputs": [TENSOR | {"shape": ["8"]}]}, r"inputs\[0\]\.shape must be an integer"),
        ({"inputs": [TENSOR | {"dims": []}]}, r"inputs\[0\] must have a dim for each"),
        ({"inputs": [TENSOR | {"dims": ["dp"]}]}, r"inputs\[0\]\.dims must be null or 'tp'"),
        ({"inputs": [TENSOR | {"shape": [1] * 9, "dims": [None] * 9}]}, "a dim for each of 0 to 8 sizes"),
        ({"inputs": [TENSOR | {"shape": [4, 4], "dims": ["tp", "tp"]}]}, r"inputs\[0\] is sharded twice"),
        ({"donated": None}, "'donated' must be a list"),
        ({"donated": [1]}, r"donated\[…\] must be a list"),
        ({"donated": [[1]]}, r"donated\[…\] must be \[output, input\]"),
        ({"donated": [[2, 1]]}, r"donated\[…\] must be \[output, input\], below 2 and 2"),
        ({"donated": [[1, -1]]}, r"donated\[…\] must be \[output, input\], below 2 and 2"),
        ({"donated": [[0, 1]]}, "output 'logits' does not fit the memory of input 'keys'"),
        ({"donated": [[1, 1], [1, 1]]}, "'donated' names one tensor twice"),
        ({"outputs": []}, r"donated\[…\] must be \[output, input\], below 0 and 2"),
    ],
)  # fmt: skip
def test_a_description_that_no_executable_has_is_refused(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ArtifactError, match=rf"^decode\.xla: damaged, or not made by llmc: .*{expected}.*compile it"):
        StepHeader.parse({**json.loads(json.dumps(STEP.to_json())), **change}, "decode.xla")


@given(st.sampled_from(sorted(STEP.to_json())), json_values)
def test_any_value_of_a_member_is_read_or_an_artifact_error(name: str, value: Any) -> None:
    try:
        found = StepHeader.parse({**json.loads(json.dumps(STEP.to_json())), name: value}, "decode.xla")
    except ArtifactError:
        return
    assert found.to_json()[name] == (tuple(value) if isinstance(value, list) else value)


@given(json_values)
def test_any_tensor_is_read_or_an_artifact_error(value: Any) -> None:
    members = {**json.loads(json.dumps(STEP.to_json())), "inputs": [value], "donated": []}
    with pytest.raises(ArtifactError):
        StepHeader.parse(members, "decode.xla")
