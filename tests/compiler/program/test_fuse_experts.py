"""Experts of a traced layer become one operator, whose inputs say all that it computes."""

from __future__ import annotations

import pytest

from llmc.compiler.frontend.trace import trace
from llmc.compiler.program.fuse import fuse_experts
from llmc.compiler.program.import_fx import import_program
from llmc.compiler.program.ir import Graph
from tests.compiler import tiny
from tests.tiers import default_cases


def graph(architecture: str) -> Graph:
    return import_program(trace(tiny.config(architecture), "fused"), 128)


@default_cases(1)
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_a_layers_experts_are_one_operator(architecture: str) -> None:
    found = graph(architecture)
    fuse_experts(found)
    found.prune()
    assert not [n for n in found.nodes if n.op == "expert_linear"]
    first, second = (n for n in found.nodes if n.op == "experts")
    assert [found.weights[v] for v in first.inputs[3:] if v] == [
        "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj",
    ]  # fmt: skip
    assert [v.shape for v in second.inputs[:3] if v] == [("B*Q", 64), ("B*Q", 2), ("B*Q", 2)]


def test_another_gate_stays_as_it_was() -> None:
    found = graph("mixtral")
    for node in found.nodes:
        node.op = "tanh" if node.op == "silu" else node.op
    fuse_experts(found)
    assert len([n for n in found.nodes if n.op == "expert_linear"]) == 4
    assert not [n for n in found.nodes if n.op == "experts"]
