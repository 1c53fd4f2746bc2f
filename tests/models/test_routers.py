"""The matrices that experts are chosen by: known by name in every family, and rounded by no device."""

from __future__ import annotations

import pytest

from llmc.compiler.architectures import supported
from llmc.compiler.architectures.shared.block_form import BlockForm
from llmc.compiler.architectures.shared.caches import cache_of
from llmc.compiler.architectures.shared.experts import is_router
from llmc.compiler.frontend.trace import trace
from llmc.compiler.program.fuse import fuse
from llmc.compiler.program.import_fx import import_program
from llmc.compiler.program.ir import Graph
from llmc.compiler.targets.onnxruntime.formats import OnnxOptions
from llmc.compiler.targets.onnxruntime.to_onnx import to_onnx
from llmc.compiler.targets.openvino.formats import Constants, format_for
from llmc.compiler.targets.xla.formats import described_as
from tests.compiler import tiny
from tests.tiers import full

ROUTER, QUERY = "model.layers.0.mlp.gate.weight", "model.layers.0.self_attn.q_proj.weight"
STORED = BlockForm("Q8_0", 8, 32, "")


def graph_of(architecture: str) -> Graph:
    config = tiny.config(architecture)
    return import_program(trace(config, "fused"), 128, cache_of(config))


def choosing(graph: Graph) -> set[str]:
    """The weights of the products that a choice of the largest, one or some, rests on: by the graph alone."""
    built, found = graph.producers(), set()
    left = [node for node in graph.nodes if node.op in ("topk", "max") and len(node.outputs) == 2]
    while left:
        node = left.pop()
        if node.op == "linear":
            found.add(graph.weights[node.inputs[1]])  # type: ignore[index]
        else:
            left += [built[value] for value in node.inputs if value in built]
    return found


@full
@pytest.mark.parametrize("mixture", [f for f in supported() if tiny.of_architecture(f).get("num_experts_per_tok")])
def test_every_choice_rests_on_a_router_and_none_is_called_one_beside(mixture: str) -> None:
    graph = graph_of(mixture)
    assert choosing(graph) == {name for name in graph.weights.values() if is_router(name)} != set()


def test_a_quantised_model_multiplies_routers_in_float32_unless_they_are_stored_in_quantized_weights() -> None:
    graph = fuse(graph_of("mixtral"))
    held = {r.sources: r.transform for r in to_onnx(graph, OnnxOptions(32, bits=4, panels=True)).recipes}
    assert held[(ROUTER,)] == "dense"
    assert "dense" not in {held[sources] for sources in held if QUERY in sources}
    kept = to_onnx(graph, OnnxOptions(32, stored={ROUTER: STORED}, panels=True))
    assert {r.transform for r in kept.recipes if r.sources == (ROUTER,)} == {"pkept8_panels"}


@pytest.mark.parametrize("quantize", ["int8", "int4", "keep"])
def test_openvino_holds_them_in_float32(quantize: str) -> None:
    for stored in ({}, {ROUTER: STORED}):
        built = format_for(quantize, stored=stored)(constants := Constants())
        built.matrix([ROUTER], [(8, 64)])
        exact = quantize == "int8" or not stored
        assert ({recipe.transform for recipe in constants.recipes} == {"dense"}) is exact


@pytest.mark.parametrize("quantize", ["int8", "fp8"])
def test_xla_takes_them_as_they_are(quantize: str) -> None:
    described = [
        {"name": name, "transform": "dense", "shape": [*layers, 8, 64], "dtype": "float32"}
        for name, layers in ((ROUTER, []), (ROUTER.replace("0", "*"), [2]), (QUERY, []))
    ]
    make = described_as(False, quantize)
    assert make is not None
    assert [tensor["transform"] for tensor in make(described)] == [
        "dense", "dense", f"{quantize}_codes", f"{quantize}_scales",
    ]  # fmt: skip
