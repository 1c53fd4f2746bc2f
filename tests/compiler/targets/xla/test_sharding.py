"""Tensor parallel: which weights are split, and that a step over several devices computes what one device does."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmc.compiler.architectures.shared.caches import cache_of
from llmc.compiler.targets.xla.sharding import (
    AXIS,
    cache_dims,
    cache_words,
    describe,
    logits_dims,
    require_degree,
    weight_shardings,
)
from llmc.errors import CompileError, InputError
from llmc.runtime.cache_shape import CacheTensor
from tests.compiler.targets.xla.sharded_steps import (
    BATCH,
    CAPACITY,
    CONFIG,
    FLAGS,
    HEAD,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    PLAIN,
    SLOTS,
    VOCAB,
    config_of,
)
from tests.tiers import full

LAYER = {
    "self_attn.q_proj.weight": (64, 64), "self_attn.k_proj.weight": (32, 64), "self_attn.v_proj.weight": (32, 64),
    "self_attn.o_proj.weight": (64, 64), "self_attn.q_norm.weight": (16,), "mlp.gate_proj.weight": (96, 64),
    "mlp.up_proj.weight": (96, 64), "mlp.down_proj.weight": (64, 96), "input_layernorm.weight": (64,),
    "self_attn.q_proj.bias": (64,), "self_attn.k_proj.bias": (32,), "self_attn.o_proj.bias": (64,),
    "mlp.up_proj.bias": (96,), "mlp.down_proj.bias": (64,),
}  # fmt: skip
WEIGHTS = {
    **{f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in LAYER.items()},
    "model.embed_tokens.weight": (VOCAB, 64), "lm_head.weight": (VOCAB, 64), "model.norm.weight": (64,),
    "model.rotary_emb.inv_freq": (8,),
}  # fmt: skip
ROWS, COLUMNS = (AXIS, None), (None, AXIS)
CACHE = cache_of(CONFIG)
STATES = "qwen3_5_text"


def dims(weights: dict[str, tuple[int, ...]] = WEIGHTS, degree: int = 2, **changes: Any) -> dict[str, Any]:
    shardings = weight_shardings(weights, CONFIG | changes, degree)
    return {name.removeprefix("model.layers.1."): s.dims for name, s in shardings.items()}


class TestRules:
    def test_heads_and_features_are_split_where_a_layer_sums_once(self) -> None:
        found = dims()
        for name in ("q_proj", "k_proj", "v_proj"):
            assert found[f"self_attn.{name}.weight"] == ROWS
        assert found["self_attn.o_proj.weight"] == COLUMNS
        assert found["mlp.gate_proj.weight"] == found["mlp.up_proj.weight"] == ROWS
        assert found["mlp.down_proj.weight"] == COLUMNS

    def test_embedding_and_head_are_split_by_vocabulary(self) -> None:
        assert dims()["model.embed_tokens.weight"] == dims()["lm_head.weight"] == ROWS
        assert logits_dims(CONFIG, 2) == COLUMNS

    def test_biases_follow_the_rows_of_their_matrix_and_those_of_sums_are_replicated(self) -> None:
        found = dims()
        assert {found[f"{name}.bias"] for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")} == {(AXIS,)}
        assert {found[f"{name}.bias"] for name in ("self_attn.o_proj", "mlp.down_proj")} == {(None,)}

    def test_norms_and_rotary_tables_are_replicated(self) -> None:
        found = dims()
        for name in (
            "input_layernorm.weight",
            "self_attn.q_norm.weight",
            "model.norm.weight",
            "model.rotary_emb.inv_freq",
        ):
            assert found[name] == (None,)

    def test_weights_stacked_over_layers_are_split_one_dimension_later(self) -> None:
        stacked = {f"model.layers.*.{name}": (LAYERS, *shape) for name, shape in LAYER.items()}
        flat = dims()
        for name, found in weight_shardings(stacked, CONFIG, 2).items():
            assert found.dims == (None, *flat[name.removeprefix("model.layers.*.")])

    def test_one_device_splits_nothing(self) -> None:
        assert {d for found in dims(degree=1).values() for d in found} == {None}
        assert set(cache_dims(CACHE.tensors[0], 1)) == set(logits_dims(CONFIG, 1)) == {None}

    def test_one_device_needs_no_rule_for_a_weight(self) -> None:
        found = weight_shardings({"model.layers.0.mlp.experts.3.up.weight": (8, 8)}, {}, 1)
        assert [s.dims for s in found.values()] == [(None, None)]
        assert describe(found, {}, 1, CACHE, dict.fromkeys(found, 1))["bytes_per_device"] == 64
        require_degree(1, 1, {}, "this host")

    def test_keys_and_values_are_split_by_heads_and_states_are_whole(self) -> None:
        assert {cache_dims(tensor, 2) for tensor in CACHE} == {(None, None, AXIS, None, None)}
        assert cache_dims(CacheTensor(0, "recurrent", "state", (4, 8, 8)), 2) == (None,) * 5

    def test_a_model_without_grouped_heads_may_leave_their_number_out(self) -> None:
        config = {k: v for k, v in CONFIG.items() if k != "num_key_value_heads"}
        assert cache_dims(cache_of(config).tensors[0], 4) == (None, None, AXIS, None, None)


class TestWhatDoesNotDivide:
    def test_key_value_heads_are_replicated_with_the_cache_and_said_so(self) -> None:
        found = weight_shardings(WEIGHTS, CONFIG, 4)
        for name in ("k_proj", "v_proj"):
            sharding = found[f"model.layers.0.self_attn.{name}.weight"]
            assert sharding.dims == (None, None)
            assert sharding.note == (
                "2 key/value heads do not divide over 4 devices: k_proj, v_proj and the cache are replicated"
            )
        assert found["model.layers.0.self_attn.q_proj.weight"].dims == ROWS
        assert cache_dims(CACHE.tensors[0], 4) == (None,) * 5

    def test_query_heads_are_replicated_and_said_so(self) -> None:
        found = weight_shardings(WEIGHTS, CONFIG, 3)
        assert found["model.layers.0.self_attn.q_proj.weight"].dims == (None, None)
        assert found["model.layers.0.self_attn.o_proj.weight"].dims == (None, None)
        assert "4 query heads do not divide over 3 devices" in found["model.layers.0.self_attn.o_proj.weight"].note
        assert found["model.layers.0.mlp.up_proj.weight"].dims == ROWS

    def test_a_vocabulary_is_replicated_and_said_so(self) -> None:
        weights = {"lm_head.weight": (257, 64)}
        found = weight_shardings(weights, CONFIG | {"vocab_size": 257}, 2)["lm_head.weight"]
        assert found.dims == (None, None)
        assert found.note.startswith("257 vocabulary rows do not divide over 2 devices")
        assert logits_dims(CONFIG | {"vocab_size": 257}, 2) == (None, None)


class TestBadInput:
    def test_a_weight_that_no_rule_names_is_not_replicated_in_silence(self) -> None:
        with pytest.raises(CompileError, match=r"'model.layers.0.mlp.experts.3.up.weight' \[8, 8\].*sharding.py"):
            weight_shardings({"model.layers.0.mlp.experts.3.up.weight": (8, 8)}, CONFIG, 2)

    def test_a_weight_that_lacks_the_heads_of_the_configuration_is_refused(self) -> None:
        with pytest.raises(CompileError, match=r"\[62, 64\] does not hold the 4 query heads"):
            weight_shardings({"model.layers.0.self_attn.q_proj.weight": (62, 64)}, CONFIG, 2)

    def test_a_configuration_without_a_count_is_refused(self) -> None:
        with pytest.raises(CompileError, match="intermediate_size is None"):
            dims(intermediate_size=None)

    def test_more_devices_than_the_topology_has_are_refused(self) -> None:
        require_degree(4, 4, CONFIG, "topology v5e-2x2")
        with pytest.raises(InputError, match=r"--tensor-parallel 8: topology v5e-2x2 has 4 devices; choose at most 4"):
            require_degree(8, 4, CONFIG, "topology v5e-2x2")

    def test_less_than_one_device_is_refused(self) -> None:
        with pytest.raises(InputError, match="--tensor-parallel 0 must be at least 1"):
            require_degree(0, 4, CONFIG, "this host")

    def test_a_degree_that_would_split_nothing_is_refused(self) -> None:
        with pytest.raises(InputError, match="splits nothing of this model: none of 4 query heads, 2 key/value"):
            require_degree(5, 8, CONFIG, "this host")


def described(degree: int) -> dict[str, Any]:
    split = weight_shardings(WEIGHTS, CONFIG, degree)
    return describe(split, CONFIG, degree, CACHE, item_bytes=dict.fromkeys(WEIGHTS, 2))


class TestReport:
    def test_it_counts_what_each_rule_decided_and_the_bytes_of_a_device(self) -> None:
        found = described(2)
        assert found["rules"]["query heads"] == {
            "weights": 4, "how": "split by rows", "bytes": 4 * (64 * 64 + 64), "bytes_per_device": 2 * (64 * 64 + 64),
        }  # fmt: skip
        assert found["rules"]["mlp output"]["how"] == "split by columns"
        assert found["rules"]["norms"]["bytes"] == found["rules"]["norms"]["bytes_per_device"]
        assert found["bytes"] == sum(row["bytes"] for row in found["rules"].values())
        assert found["bytes_per_device"] < found["bytes"] < 2 * found["bytes_per_device"]
        assert (found["cache"], found["notes"]) == ("split by key/value heads", [])

    def test_it_says_once_what_is_replicated_and_why(self) -> None:
        found = described(4)
        assert [note.partition(" devices: ")[2] for note in found["notes"]] == [
            "k_proj, v_proj and the cache are replicated"
        ]
        assert found["rules"]["key/value heads"]["how"] == found["cache"] == "replicated"
        json.dumps(found)

    @pytest.mark.parametrize(
        ("case", "degree", "words"),
        [
            ("llama", 2, "split by key/value heads"),
            ("llama", 4, "replicated"),
            ("mamba2", 2, "replicated"),
            ("qwen3_5_text", 2, "split by key/value heads, states replicated"),
            ("gemma4_text", 2, "split by key/value heads, keys and values of 1 head replicated"),
        ],
    )
    def test_it_says_what_of_the_cache_is_split(self, case: str, degree: int, words: str) -> None:
        assert cache_words(cache_of(config_of(case)), degree) == words


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each model's steps over several devices did: "MODEL PHASE DEGREE" → its report (sharded_steps.py)."""
    import torch

    from llmc.compiler.frontend.trace import trace_weightless
    from llmc.compiler.program.to_export import serialise

    folder = tmp_path_factory.mktemp("traced")
    files = [folder / f"{case}.json" for case in (PLAIN, STATES)]
    for file in files:
        traced = trace_weightless(config_of(file.stem), "two_part", cached=True, dtype=torch.float32)
        file.write_text(json.dumps(serialise(traced.exported)))
    env = os.environ | {"XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.compiler.targets.xla.sharded_steps", *map(str, files)]
    root = Path(__file__).parents[4]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@full
@pytest.mark.parametrize("phase", BATCH)
def test_steps_with_states_over_two_devices_compute_what_one_does(steps: dict[str, Any], phase: str) -> None:
    found = steps[f"{STATES} {phase} 2"]
    assert found["logits"] < 1e-4
    assert found["cache"] < 1e-4
    assert found["written"] > 0.01, "an array of the cache has not changed"
    share = sum(
        math.prod(group[0].size(SLOTS, CAPACITY)) * len(group) * 4 // (2 if AXIS in cache_dims(group[0], 2) else 1)
        for group in cache_of(config_of(STATES)).groups
    )
    assert found["aliased"] == share, "not all of the cache is updated in place"


@full
@pytest.mark.parametrize("phase", BATCH)
class TestStep:
    @pytest.mark.parametrize("degree", [2, 3, 4])
    def test_several_devices_compute_what_one_does(self, steps: dict[str, Any], phase: str, degree: int) -> None:
        found = steps[f"{PLAIN} {phase} {degree}"]
        assert found["logits"] < 1e-5
        assert found["cache"] < 1e-5
        assert found["written"] > 0.01, "the cache has not changed"

    @pytest.mark.parametrize("degree", [2, 4])
    def test_a_layer_sums_twice_and_the_embedding_once(self, steps: dict[str, Any], phase: str, degree: int) -> None:
        batch, query = BATCH[phase]
        sums = steps[f"{PLAIN} {phase} {degree}"]["collectives"]["all-reduce"]
        assert sums["count"] == 2 * LAYERS + 1
        assert sums["bytes"] == sums["count"] * batch * query * HIDDEN * 4

    def test_nothing_but_logits_is_gathered_where_heads_divide(self, steps: dict[str, Any], phase: str) -> None:
        found = steps[f"{PLAIN} {phase} 2"]["collectives"]
        assert set(found) == {"all-reduce", "all-gather"}
        assert found["all-gather"]["bytes"] == BATCH[phase][0] * VOCAB * 4

    def test_of_a_replicated_cache_only_new_entries_are_gathered(self, steps: dict[str, Any], phase: str) -> None:
        batch, query = BATCH[phase]
        found = steps[f"{PLAIN} {phase} 4"]["collectives"]
        assert set(found) == {"all-reduce", "all-gather"}
        entries = 2 * LAYERS * batch * KV_HEADS * query * HEAD
        assert found["all-gather"]["bytes"] <= 4 * (batch * VOCAB + entries)

    def test_attention_that_is_replicated_exchanges_nothing(self, steps: dict[str, Any], phase: str) -> None:
        found = steps[f"{PLAIN} {phase} 3"]["collectives"]
        assert {kind: row["count"] for kind, row in found.items()} == {"all-reduce": LAYERS}

    @pytest.mark.parametrize("degree", [2, 3, 4])
    def test_the_cache_is_updated_in_place(self, steps: dict[str, Any], phase: str, degree: int) -> None:
        share = 2 if degree == 2 else 1
        assert (
            steps[f"{PLAIN} {phase} {degree}"]["aliased"]
            == 2 * LAYERS * SLOTS * KV_HEADS * CAPACITY * HEAD * 4 // share
        )
