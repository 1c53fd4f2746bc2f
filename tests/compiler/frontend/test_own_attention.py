"""Models outside transformers' attention interface attend as the dialect says, and compute what they did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from llmc.compiler.architectures.shared.caches import cache_of
from llmc.compiler.architectures.shared.families import family
from llmc.compiler.frontend.attention import attention_name
from llmc.compiler.frontend.own_attention import take_over
from llmc.compiler.frontend.skeleton import model_config
from llmc.compiler.frontend.trace import Step
from llmc.errors import CheckpointError
from tests.compiler import tiny

FORMS: dict[str, dict[str, Any]] = {
    "one head of keys": {"new_decoder_architecture": False, "multi_query": True},
    "keys for each head": {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 4},
    "one after the other": {"new_decoder_architecture": False, "parallel_attn": False, "bias": True},
    "one norm": {"num_ln_in_parallel_attn": 1},
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_falcon_that_its_tiny_configuration_has_not(form: str) -> None:
    config = {**tiny.ARCHITECTURES["falcon"], **FORMS[form]}
    config = family(config).in_common_terms(config)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(model_config(config), dtype=torch.float32).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.15)
    names = family(config).tensor_names(config) - {"lm_head.weight"}
    assert names == set(dict(model.named_parameters()))
    ids, past, new = torch.randint(0, 250, (2, 6)), torch.zeros(2, dtype=torch.long), torch.tensor([4, 6])
    with torch.no_grad():
        wanted = [model(ids[row : row + 1, :n]).logits[0, -1] for row, n in enumerate(new.tolist())]
        take_over(model, attention_name("two_part"))
        logits, *kept = Step(model, "two_part", cache_of(config))(ids, past, new, [])
    assert torch.allclose(logits, torch.stack(wanted), atol=1e-5)
    assert kept[0].shape[1] == config["num_key_value_heads"]


def test_attention_in_code_that_is_not_known_is_refused() -> None:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                         num_attention_heads=2))  # fmt: skip
    with pytest.raises(CheckpointError, match="LlamaForCausalLM computes attention outside transformers' interface"):
        take_over(model, attention_name("two_part"))
