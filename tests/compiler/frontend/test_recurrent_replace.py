"""transformers' layers with a state, over chunks of ragged rows, against the same model over whole texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from llmc.compiler.frontend.recurrent import STATES, StateCache, replace_functions

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        **_HEADS, "layer_types": ["linear_attention"] * 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
    "granitemoehybrid": {
        **_HEADS, **_MAMBA2, "layer_types": ["mamba"] * 2, "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": 48,
    },
    "jamba": {**_HEADS, "attn_layer_offset": 5, "attn_layer_period": 8, "num_experts": 1},
    "lfm2": {**_HEADS, "layer_types": ["conv", "conv"]},
}  # fmt: skip
CHUNKS = ((7, 5, 1), (6, 9, 3), (1, 1, 1), (4, 1, 12))
"""Tokens of three rows, step by step."""


class Held:
    """States by name, and those after the step."""

    def __init__(self, states: dict[str, Tensor], past_lengths: Tensor, new_lengths: Tensor) -> None:
        self.states, self.past_lengths, self.new_lengths = states, past_lengths, new_lengths
        self.new: dict[str, Tensor] = {}

    def state(self, layer: int, name: str) -> Tensor | None:
        return self.states.get(f"{layer}.{name}")

    def keep_state(self, layer: int, name: str, state: Tensor) -> None:
        self.new[f"{layer}.{name}"] = state


class Recording(StateCache):
    """What a model's body asks of a cache beside its states."""

    is_compileable = False
    is_sliding = (False,)
    layers: tuple[Any, ...] = ()

    def get_seq_length(self, *_: Any) -> int:
        return 0

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query: int, *_: Any) -> tuple[int, int]:
        return query, 0


def tiny(model_type: str) -> nn.Module:
    torch.manual_seed(3)
    config = AutoConfig.for_model(model_type, pad_token_id=None, **SIZES, **MODELS[model_type])
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0, 0.2)
    replace_functions(model)
    return model


@pytest.mark.parametrize("model_type", MODELS)
def test_rows_go_on_from_the_state_after_their_last_live_token(model_type: str) -> None:
    model, texts = tiny(model_type), torch.randint(0, 64, (3, 40))
    whole = model(texts, use_cache=False).logits
    past, states = torch.zeros(3, dtype=torch.long), {}
    for counts in CHUNKS:
        given = torch.full((3, max(counts)), 63)
        for row, count in enumerate(counts):
            given[row, :count] = texts[row, past[row] : past[row] + count]
        held = Held(states, past, torch.tensor(counts))
        cache = Recording(held)
        token = STATES.set(cache)
        try:
            logits = model(given, past_key_values=cache, use_cache=True).logits
        finally:
            STATES.reset(token)
        for row, count in enumerate(counts):
            expected = whole[row, past[row] : past[row] + count]
            torch.testing.assert_close(logits[row, :count], expected, rtol=1e-4, atol=1e-4)
        states, past = held.new, past + torch.tensor(counts)
    assert set(states) >= {"0.conv", "1.conv"}


def test_outside_a_step_the_functions_are_transformers_own() -> None:
    model = tiny("lfm2")
    first = model(torch.arange(5)[None], use_cache=False).logits
    replace_functions(model)
    torch.testing.assert_close(model(torch.arange(5)[None], use_cache=False).logits, first)


def test_a_rotation_by_three_positions_is_texts_without_writing_in_place() -> None:
    rotary: Any = tiny("qwen3_5_text").get_submodule("model.rotary_emb")
    x, positions = torch.zeros(1), torch.arange(9)[None]
    built = rotary(x, positions)
    del rotary.recomposition_frequencies  # the one of the instance
    torch.testing.assert_close(built, rotary(x, positions))
