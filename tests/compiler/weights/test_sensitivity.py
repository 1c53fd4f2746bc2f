"""What 4 bits of a group of matrices cost, and the divergence of the whole quantised model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from llmc.compiler.architectures.shared.names import EMBEDDING, LM_HEAD
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.checkpoint.base import stored_name
from llmc.compiler.frontend.real_model import load_real_model
from llmc.compiler.weights.nbits import q4_values, quantise_q4
from llmc.compiler.weights.sensitivity import Judged, divergence
from tests.compiler import tiny

JUDGED = Judged(np.random.default_rng(4).integers(0, 250, (3, 20)).tolist(), first=4)
PROBE = np.random.default_rng(5).integers(0, 250, 16).tolist()
NONE: frozenset[str] = frozenset()


def test_costs_are_of_one_group_alone_and_the_divergence_of_all(tmp_path: Path) -> None:
    model = open_checkpoint(tiny.write_model(tmp_path / "model", "llama"))
    reported: list[tuple[int, int]] = []
    found, costs = divergence(model, JUDGED, NONE, PROBE, lambda *at: reported.append(at))
    layers = int(model.config["num_hidden_layers"])
    assert reported == [(done, layers) for done in range(1, layers + 1)]
    groups = {tuple(name.split(".")[-2] for name in cost.names) for cost in costs}
    assert groups == {("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)}
    assert len(costs) == len(groups) * layers
    assert all(cost.weights == sum(np.prod(model.shape(name)) for name in cost.names) for cost in costs)

    whole, one = load_real_model(model), next(cost for cost in costs if "down_proj" in cost.names[0])
    wanted = torch.log_softmax(whole(torch.tensor([PROBE])).logits[0], -1).detach()
    weight = model.tensor(one.names[0])
    quantized, scales, offsets = quantise_q4(weight, 32)
    values = (quantized.astype(np.float32) - 8) * scales[..., None] + offsets[..., None]
    whole.get_submodule(one.names[0].removesuffix(".weight")).weight.data = torch.from_numpy(
        values.reshape(weight.shape)
    )
    got = torch.log_softmax(whole(torch.tensor([PROBE])).logits[0], -1).detach()
    assert one.divergence == pytest.approx(float((wanted.exp() * (wanted - got)).sum(-1).mean()), rel=0.01)

    names = frozenset(name for cost in costs for name in cost.names)
    wide, none = divergence(model, JUDGED, names, [])
    assert none == []
    assert wide < 0.1 * found


@pytest.mark.parametrize("family", ["llama", "gemma2"], ids=["head of its own", "tied, embedding scaled"])
def test_embedding_and_head_are_one_group_of_all(tmp_path: Path, family: str) -> None:
    model = open_checkpoint(tiny.write_model(tmp_path / "model", family))
    found, costs = divergence(model, JUDGED, NONE, PROBE, embed_lm_head=True)
    without, others = divergence(model, JUDGED, NONE, PROBE)
    one, *layers = costs
    assert one.names == (EMBEDDING, LM_HEAD)[: 1 if family == "gemma2" else 2]
    assert one.weights == sum(np.prod(model.shape(name)) for name in one.names)
    assert [cost.names for cost in layers] == [cost.names for cost in others]
    assert [cost.divergence for cost in layers] == pytest.approx([cost.divergence for cost in others], rel=1e-3)
    assert found > without
    assert divergence(model, JUDGED, frozenset(one.names), [], embed_lm_head=True)[0] == pytest.approx(
        without, rel=1e-3
    )

    whole = load_real_model(model)
    wanted = torch.log_softmax(whole(torch.tensor([PROBE])).logits[0], -1).detach()
    for name in (EMBEDDING, LM_HEAD):
        rounded = torch.from_numpy(q4_values([stored_name(name, model.tensor_names())], model, 32))
        whole.get_submodule(name.removesuffix(".weight"))._parameters["weight"] = torch.nn.Parameter(rounded)
    got = torch.log_softmax(whole(torch.tensor([PROBE])).logits[0], -1).detach()
    assert one.divergence == pytest.approx(float((wanted.exp() * (wanted - got)).sum(-1).mean()), rel=0.01)


def test_an_embedding_whose_rows_are_no_whole_blocks_is_no_group(tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).save_pretrained(tmp_path / "model")
    model = open_checkpoint(tmp_path / "model")
    with_embed_lm_head, without = (
        divergence(model, JUDGED, NONE, PROBE, embed_lm_head=requested) for requested in (True, False)
    )
    assert with_embed_lm_head == without
