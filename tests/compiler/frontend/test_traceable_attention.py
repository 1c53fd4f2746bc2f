"""Models outside transformers' attention interface attend as the dialect says, and compute what they did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

from llmc.compiler.architectures.shared.architectures import architecture
from llmc.compiler.architectures.shared.caches import cache_of
from llmc.compiler.frontend.attention import DIALECTS, Dialect, attention_name, fused_attention, slopes_of_heads
from llmc.compiler.frontend.skeleton import model_config
from llmc.compiler.frontend.trace import TracedStep
from llmc.compiler.frontend.traceable import take_over
from llmc.errors import CheckpointError
from tests.compiler import tiny

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "one head of keys": ("falcon", {"new_decoder_architecture": False, "multi_query": True}),
    "keys for each head": ("falcon", {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 4}),
    "one after the other": ("falcon", {"new_decoder_architecture": False, "parallel_attn": False, "bias": True}),
    "one norm": ("falcon", {"num_ln_in_parallel_attn": 1}),
    "ALiBi, rounded": ("falcon", tiny.FORMS["falcon-alibi"]),
    "slopes of heads that are no power of two": ("bloom", {"n_head": 12, "hidden_size": 96}),
    "slopes in another order": ("mpt", {"n_heads": 12, "d_model": 96}),
    "a scale of its own": ("mpt", {"attn_config": {"softmax_scale": 0.5}}),
}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("form", FORMS)
def test_forms_that_tiny_configurations_have_not(form: str, dialect: Dialect) -> None:
    name, keys = FORMS[form]
    own = architecture({"model_type": name})
    config = own.in_common_terms({"model_type": name, "vocab_size": 250, **own.tiny, **keys})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(model_config(config), dtype=torch.float32).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.15)
    assert own.tensor_names(config) - {"lm_head.weight"} == set(dict(model.named_parameters()))
    ids, past, new = torch.randint(0, 250, (2, 6)), torch.zeros(2, dtype=torch.long), torch.tensor([4, 6])
    with torch.no_grad():
        wanted = [model(ids[row : row + 1, :n]).logits[0, -1] for row, n in enumerate(new.tolist())]
        take_over(model, attention_name(dialect))
        shape = cache_of(config)
        room = [torch.full(t.size(2, 6), torch.nan) for t in shape] if dialect == "fused" else []
        logits, *kept = TracedStep(model, dialect, shape)(ids, past, new, room)
    assert torch.allclose(logits, torch.stack(wanted), atol=1e-5)
    assert kept[0].shape[1] == config.get("num_key_value_heads", config["num_attention_heads"])


@pytest.mark.parametrize("heads", [1, 3, 8, 12, 112])
def test_slopes_built_by_operators_are_those_given(heads: int) -> None:
    given = _get_alibi_slopes(heads, torch.device("cpu"))
    assert torch.allclose(slopes_of_heads(given.tolist()), given, rtol=1e-6)


def test_the_reference_of_an_operator_with_slopes_is_that_of_plain_arithmetic() -> None:
    query, key, value = (torch.randn(1, 2, 5, 8) for _ in range(3))
    past = torch.zeros(1, 2, 5, 8)
    out, *_ = fused_attention(query, key, value, past, past, torch.zeros(1).long(), None, 0.25, 0.0, -1, [0.5, 0.125])
    bias = torch.tensor([0.5, 0.125])[:, None, None] * torch.arange(5.0)
    seen = torch.ones(5, 5).tril().log()
    wanted = torch.softmax(query @ key.transpose(-1, -2) * 0.25 + bias + seen, -1) @ value
    assert torch.allclose(out.transpose(1, 2), wanted, atol=1e-6)


@pytest.mark.parametrize(("member", "value"), [("alibi", False), ("prefix_lm", True), ("alibi_bias_max", 16)])
def test_attention_that_transformers_does_not_compute_is_refused(member: str, value: object) -> None:
    own = architecture({"model_type": "mpt"})
    with pytest.raises(CheckpointError, match=f"attn_config has {member} {value}, but transformers computes"):
        own.in_common_terms({"model_type": "mpt", **own.tiny, "attn_config": {member: value}})


def test_attention_in_code_that_is_not_known_is_refused() -> None:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                         num_attention_heads=2))  # fmt: skip
    with pytest.raises(CheckpointError, match="LlamaForCausalLM computes attention outside transformers' interface"):
        take_over(model, attention_name("two_part"))
