"""Attention takes the rotary tables of its own layer, and its norms are fused: in Gemma 4 both differ by layer."""

from __future__ import annotations

import pytest

from llmc.compiler.architectures.shared.caches import cache_of
from llmc.compiler.frontend.trace import trace
from llmc.compiler.program.fuse import fuse
from llmc.compiler.program.import_fx import import_program
from llmc.compiler.program.ir import Graph, Node
from tests.compiler import tiny

SLIDING, GLOBAL = 8, 16
"""Half the widths of a head."""


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Two layers with keys of their own; without experts, and without a second embedding."""
    config = tiny.config("gemma4_text") | {
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
        "enable_moe_block": False, "hidden_size_per_layer_input": 0,
    }  # fmt: skip
    return fuse(import_program(trace(config, "fused"), 128, cache_of(config)))


def attentions(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "gqa"]


def test_each_attention_turns_by_the_tables_of_its_layers_kind(graph: Graph) -> None:
    tables = [node.inputs[6:8] for node in attentions(graph)]
    assert [[v.shape for v in pair if v] for pair in tables] == [[(128, n)] * 2 for n in (SLIDING, GLOBAL)]
    assert all(value in graph.tables for pair in tables for value in pair)
    assert not {"position_table", "cat", "neg", "attention"} & {node.op for node in graph.nodes}


def test_every_norm_that_has_a_weight_is_one_operator(graph: Graph) -> None:
    norms = {value for value, name in graph.weights.items() if "norm" in name}
    fused = [node.inputs[-1] for node in graph.nodes if node.op in ("rms_norm", "skip_rms_norm")]
    assert len(norms) == 2 * 6 + 1, "four, of queries and of keys in a layer, and the last"
    assert set(fused) == norms
    assert len(fused) == len(norms)


def test_norms_of_values_which_have_no_weight_stay_as_they_were(graph: Graph) -> None:
    assert len([node for node in graph.nodes if node.op == "mean"]) == len(attentions(graph))
