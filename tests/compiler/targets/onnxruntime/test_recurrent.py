"""Operators of layers with a state, as ONNX Runtime computes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from llmc.compiler.frontend import recurrent
from llmc.compiler.program.ir import Graph, Node, Value
from llmc.compiler.targets.onnxruntime.formats import OnnxOptions
from llmc.compiler.targets.onnxruntime.to_onnx import to_onnx
from llmc.runtime.executors.onnxruntime.session import open_session
from tests.compiler.frontend.test_recurrent import CASES

FIXED = {"causal_conv": ("weight", "bias"), "state_scan": ("rate",)}
"""Arguments that have no rows."""


def lowered(kind: str, given: dict[str, Any]) -> Any:
    """A model of one operator, for any number of rows and tokens."""
    values: dict[str, Value | None] = {"token_ids": Value("token_ids", ("B", "Q"), "int64")}
    attrs = {}
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            shape: tuple[Any, ...] = tuple(value.shape)
            if name not in FIXED.get(kind, ()):
                shape = ("B", *(shape[1:] if name == "state" else ("Q", *shape[2:])[: len(shape) - 1]))
            values[name] = Value(name, shape, str(value.dtype).removeprefix("torch."))
        elif name == "bias":
            values[name] = None
        else:
            attrs[name] = value
    main = values["x" if "x" in values else "value"]
    state = values["state"]
    assert main is not None
    assert state is not None
    outputs = [Value("out", main.shape, "float32"), Value("kept", state.shape, "float32")]
    node = Node(kind, [v for name, v in values.items() if name != "token_ids"], outputs, attrs)
    inputs = {name: v for name, v in values.items() if v is not None}
    graph = Graph(inputs, [(o.name, o) for o in outputs], [node], {}, {})
    model = to_onnx(graph, OnnxOptions(0)).model
    return open_session(model.SerializeToString())  # beside others of the process, which share a pool


@pytest.mark.parametrize("name", [name for name in CASES if name != "gated_delta of any length"])
def test_one_model_computes_what_the_operator_means_at_any_number_of_tokens(name: str) -> None:
    kind = name.split(maxsplit=1)[0]
    names = [a.name for a in getattr(torch.ops.llmc, kind).default._schema.arguments]
    session = lowered(kind, dict(zip(names, CASES[name](5), strict=True)))
    for length in (1, 9):
        given = CASES[name](length)
        fed = {n: v.numpy() for n, v in zip(names, given, strict=True) if isinstance(v, torch.Tensor)}
        fed["token_ids"] = np.zeros((3, length), np.int64)
        needed = {i.name for i in session.get_inputs()}
        out, kept = session.run(None, {n: v for n, v in fed.items() if n in needed})
        wanted, state = getattr(recurrent, kind)(*given)
        np.testing.assert_allclose(kept, state.numpy(), rtol=2e-4, atol=2e-4)
        for row, live in enumerate(fed["new_lengths"]):
            np.testing.assert_allclose(out[row, :live], wanted[row, :live].numpy(), rtol=2e-4, atol=2e-4)
