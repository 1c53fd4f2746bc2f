"""Traced programs in the store: what is read back is what was traced, for every architecture."""

from __future__ import annotations

import numpy as np
import pytest

from llmc.compiler.frontend.trace import trace
from llmc.compiler.program.fuse import fuse
from llmc.compiler.program.import_fx import import_program
from llmc.compiler.program.ir import Graph
from llmc.compiler.program.program import PROGRAM, TABLES, read_graph, write_graph
from llmc.compiler.targets.onnxruntime.formats import OnnxOptions
from llmc.compiler.targets.onnxruntime.to_onnx import to_onnx
from tests.compiler import tiny

POSITIONS = 32


def traced(case: str) -> Graph:
    return import_program(trace(tiny.config(case), "fused"), POSITIONS)


@pytest.mark.parametrize("case", tiny.REPRESENTATIVES)
def test_a_graph_comes_back_as_it_was_and_is_lowered_to_the_same_bytes(case: str) -> None:
    graph = traced(case)
    files = write_graph(graph)
    assert files == write_graph(traced(case)), "two traces are one entry of a store"
    again = read_graph(files[PROGRAM], files[TABLES])
    assert again.text() == graph.text()
    assert all(np.array_equal(a, b) for a, b in zip(again.tables.values(), graph.tables.values(), strict=True))
    built, remade = (to_onnx(fuse(g), OnnxOptions(0)) for g in (graph, again))
    assert remade.model.SerializeToString(deterministic=True) == built.model.SerializeToString(deterministic=True)
    assert remade.recipes == built.recipes
