"""Models of one shape over contiguous caches, against transformers."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch

from llmc.compiler.program.ir import Graph, Node, Value
from llmc.compiler.targets.openvino.formats import Constants, Int8, WeightFormat
from llmc.compiler.targets.openvino.paged import PagedModel
from llmc.compiler.targets.openvino.static import StaticModel
from llmc.errors import CompileError
from llmc.runtime.executors.openvino.device import open_core
from tests.compiler import tiny
from tests.compiler.frontend.test_frontend import CASES, CONTEXT, STEPS
from tests.compiler.frontend.test_frontend import replay as replayed
from tests.compiler.targets.openvino.static_models import EXACT, from_graph, graph, run_of
from tests.tiers import default_cases

OTHERS = (
    "phi3", "olmo2", "exaone4", "bloom", "falcon-alibi", "gpt2", "mixtral", "deepseek_v3", "gemma4_text",
    "qwen3_5_text", "granitemoehybrid", "mamba",
)  # fmt: skip
"""Layers and caches of all kinds: values narrower than keys, layers of several sizes and without a cache, states."""


@default_cases(1)
@pytest.mark.parametrize("case", [*CASES, *OTHERS])
def test_ragged_padded_steps_over_a_cache_of_nan_give_the_models_logits(case: str, tmp_path: Path) -> None:
    """First prompts, chunks over a past and decoding; windows are shorter than the text."""
    replay = replayed(case, run_of(case, tmp_path), in_place=False)
    for counts in STEPS:
        assert max(replay.step(counts, CONTEXT if any(replay.past) else 0)) < 1e-4


def test_a_step_of_one_row_and_one_token_is_right_over_caches_of_any_length(tmp_path: Path) -> None:
    replay = replayed("mistral", run_of("mistral", tmp_path), in_place=False)
    replay.tokens, replay.kept = replay.tokens[:1], [t[:1] for t in replay.kept]
    for context in (0, 1, 2, 3):
        assert max(replay.step((1,), context)) < 1e-4


def test_a_table_of_what_positions_add_is_computed_by_plain_operators_where_attention_is_paged() -> None:
    plain = PagedModel(graph("falcon-alibi"), WeightFormat(Constants())).plain
    assert plain == {"attention": (2, "scores with a table of position biases have no paged form")}


def test_every_size_is_a_number_and_inputs_and_outputs_are_those_of_the_contract() -> None:
    model = from_graph("llama", Int8(Constants()), (3, 2, 8))
    assert not model.is_dynamic()
    found = {port.any_name: (tuple(port.shape), port.element_type.get_type_name()) for port in model.inputs}
    step = {"token_ids": ((3, 2), "i32"), "past_lengths": ((3,), "i32"), "new_lengths": ((3,), "i32")}
    assert found == step | {f"past_{w}{i}": ((3, 2, 8, 16), "f32") for i in range(2) for w in "kv"}
    shapes = {port.any_name: tuple(port.shape) for port in model.outputs}
    assert shapes == {"logits": (3, 257), **{f"new_{w}{i}": (3, 2, 2, 16) for i in range(2) for w in "kv"}}


def test_matrices_are_in_the_format_that_was_requested() -> None:
    constants = Constants()
    from_graph("llama", Int8(constants), (1, 1, 8))
    matrices = [r for r in constants.recipes if r.transform == "i8_data"]
    dense = [r.name for r in constants.recipes if r.transform == "dense"]
    held = {name for r in matrices for name in r.sources}
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.down_proj.weight"} <= held
    assert dense
    assert all("norm" in name for name in dense)


def test_shapes_of_one_model_share_their_weights() -> None:
    constants = Constants()
    weights = Int8(constants)
    StaticModel(graph("llama"), weights, 1, 1, 8)
    known = {r.name for r in constants.recipes if r.transform != "table"}
    StaticModel(graph("llama"), weights, 2, 4, 0)
    assert {r.name for r in constants.recipes if r.transform != "table"} == known


def test_the_largest_logits_come_out_where_they_are_requested() -> None:
    model = StaticModel(graph("llama"), WeightFormat(Constants()), 2, 4, 0, top_k=5).model
    shapes = {port.any_name: tuple(port.shape) for port in model.outputs}
    assert shapes["top_values"] == shapes["top_ids"] == (2, 5)


@pytest.mark.parametrize("sink", [None, 0.4])
def test_scores_are_capped_and_a_sink_takes_its_share(sink: float | None) -> None:
    """softmax(cap · tanh(score / cap)) of one head, by hand, over the sink, too."""
    size, cap, tokens = 4, 0.75, 3
    random = np.random.default_rng(1)
    matrix = random.standard_normal((8, 3 * size)).astype(np.float32)
    ids = Value("token_ids", ("B", "Q"), "int64")
    past = [Value(f"past_{w}0", ("B", 1, "S", size), "float32") for w in "kv"]
    lengths, sinks = Value("past_lengths", ("B",), "int64"), Value("sinks", (1,), "float32")
    weight, packed = Value("w", (8, 3 * size), "float32"), Value("x", ("B", "Q", 3 * size), "float32")
    out, logits = Value("a", ("B", "Q", size), "float32"), Value("l", ("B", size), "float32")
    attrs = {"heads": 1, "kv_heads": 1, "head_dim": size, "scale": 0.5, "softcap": cap, "window": -1}
    nodes = [
        Node("embedding", [weight, ids], [packed]),
        Node("gqa", [packed, None, None, *past, lengths, None, None, *([] if sink is None else [sinks])], [out], attrs),
        Node("last_rows", [out, Value("new_lengths", ("B",), "int64")], [logits]),
    ]

    class Given(WeightFormat):
        def matrix(self, *_: Any, **__: Any) -> Any:
            return ov.opset13.constant(matrix)

        def vector(self, *_: Any) -> Any:
            return ov.opset13.constant(np.array([sink], np.float32))

    built = StaticModel(
        Graph({}, [("logits", logits)], nodes, {weight: "w", sinks: "s"}, {}), Given(Constants()), 1, tokens, 0
    ).model
    step = {"token_ids": [[1, 2, 3]], "past_lengths": [0], "new_lengths": [tokens]}
    got = open_core().compile_model(built, "CPU", EXACT)({n: np.array(v, np.int32) for n, v in step.items()})
    q, k, v = np.split(matrix[1:4], 3, -1)
    scores = torch.tensor(cap * np.tanh((0.5 * q[-1]) @ k.T / cap))
    all_scores = scores if sink is None else torch.cat([scores, torch.tensor([sink])])
    shares = torch.softmax(all_scores, -1)[:tokens].numpy()
    np.testing.assert_allclose(got["logits"][0], shares @ v, rtol=1e-5, atol=1e-6)


def test_positions_are_never_multiplied_in_the_model() -> None:
    """In float16, which devices compute in, a position times a frequency is no angle any more."""
    model = from_graph("llama", WeightFormat(Constants()), (1, 4, 8))
    assert not {"Cos", "Sin"} & {node.get_type_name() for node in model.get_ops()}


@default_cases(1)
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu"])
def test_activations_that_are_no_silu_are_lowered_too(
    activation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = f"llama-{activation}"
    monkeypatch.setitem(tiny.VARIANTS, case, {"hidden_act": activation})
    replay = replayed(case, run_of(case, tmp_path), in_place=False)
    for counts in STEPS[:3]:
        assert max(replay.step(counts, CONTEXT if any(replay.past) else 0)) < 1e-4


def test_an_unknown_operator_of_the_fused_graph_is_named() -> None:
    changed = copy.deepcopy(graph("llama"))
    next(n for n in changed.nodes if n.op == "silu").op = "erfinv"
    with pytest.raises(CompileError, match=re.escape("operator 'erfinv' has no OpenVINO lowering")):
        StaticModel(changed, WeightFormat(Constants()), 1, 1, 8)
