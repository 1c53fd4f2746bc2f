"""Operators of layers with a state are written out in portable programs, at each number of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from llmc.compiler.frontend import recurrent
from llmc.compiler.program.to_export import expanded, is_expanded, operator_of
from llmc.runtime.portable_program import argument, arguments, operator, output_names
from tests.compiler.frontend.test_recurrent import CASES


def call(kind: str, given: tuple[Any, ...]) -> dict[str, Any]:
    """The node of an operator over inputs named by its arguments, as model.json has it."""
    target = f"torch.ops.llmc.{kind}.default"
    written = [
        (a.name, {"as_tensor": {"name": a.name}} if isinstance(value, Tensor) else
         {"as_none": True} if value is None else {"as_bool": value})
        for a, value in zip(operator_of(target)._schema.arguments, given, strict=True)
    ]  # fmt: skip
    outputs = [{"as_tensor": {"name": "out"}}, {"as_tensor": {"name": "kept"}}]
    return {"target": target, "inputs": [{"name": n, "arg": arg, "kind": 1} for n, arg in written], "outputs": outputs}


@pytest.mark.parametrize("length", [1, 70])
@pytest.mark.parametrize("name", CASES)
def test_a_written_out_operator_is_built_of_aten_s_and_computes_the_same(name: str, length: int) -> None:
    given, kind = CASES[name](length), name.split(maxsplit=1)[0]
    node = call(kind, given)
    assert is_expanded(node["target"])
    with torch.no_grad(), FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) if isinstance(t, Tensor) else t for t in given]
        nodes = list(expanded(node, fake))
    values = {i["name"]: t for i, t in zip(node["inputs"], given, strict=True) if isinstance(t, Tensor)}
    for built in nodes:
        target = operator(built["target"])  # raises for an operator that is not ATen's
        args, kwargs = arguments(built, target._schema, values.__getitem__)
        ((output,), _) = output_names(built)
        assert output not in values
        values[output] = target(*args, **kwargs)
    out, state = (argument(o, values.__getitem__) for o in node["outputs"])
    wanted, kept = getattr(recurrent, kind)(*given)
    for row, live in enumerate([t for t in given if isinstance(t, Tensor)][-1]):
        torch.testing.assert_close(out[row, :live], wanted[row, :live], rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(state, kept, rtol=2e-4, atol=2e-4)


def test_other_operators_stay() -> None:
    assert not is_expanded("torch.ops.llmc.attend.default")
    assert not is_expanded("torch.ops.aten.cat.default")
