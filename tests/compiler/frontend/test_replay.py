"""Layers that run again on hidden states of one's own: the same model, and one with other weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.frontend.real_model import load_real_model
from llmc.compiler.frontend.replay import ReplayedModel, Way
from tests.compiler import tiny
from tests.tiers import default_cases

CALLS = np.random.default_rng(0).integers(0, 250, (3, 12)).tolist()


@default_cases(2)
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma4_text", "bloom", "qwen3_next"])
def test_a_way_with_the_same_weights_ends_in_the_models_logits(tmp_path: Path, architecture: str) -> None:
    checkpoint = open_checkpoint(tiny.write_model(tmp_path / "model", architecture))
    ways = [Way(call) for call in range(len(CALLS))]

    def leaving(layer: nn.Module) -> None:
        for way in ways:
            replayed.through(layer, way.branch())  # leaves no trace
            replayed.through(layer, way)

    replayed = ReplayedModel(checkpoint, leaving)
    predicted = replayed.run(CALLS, 2)
    whole = load_real_model(checkpoint)
    assert len(predicted) == 2, "the third call ended with the last layer"
    for call, tokens in enumerate(CALLS):
        wanted = whole(torch.tensor([tokens]), use_cache=False).logits[0].detach()
        torch.testing.assert_close(replayed.tail(tokens, ways[call]), wanted, atol=1e-4, rtol=1e-4)
        if call < 2:
            torch.testing.assert_close(predicted[call], wanted, atol=1e-4, rtol=1e-4)


def test_other_weights_are_the_ways_alone(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny.write_model(tmp_path / "model", "llama"))
    whole = load_real_model(checkpoint)
    apart = Way(0)

    def leaving(layer: nn.Module) -> None:
        module = layer.get_submodule("mlp.up_proj")
        replayed.through(layer, apart, {module: module.weight.detach() * 2})  # type: ignore[operator]

    replayed = ReplayedModel(checkpoint, leaving)
    (predicted,) = replayed.run(CALLS[:1], 1)
    tokens = torch.tensor(CALLS[:1])
    torch.testing.assert_close(predicted, whole(tokens, use_cache=False).logits[0].detach(), atol=1e-4, rtol=1e-4)
    for name, parameter in whole.named_parameters():
        if name.endswith("up_proj.weight"):
            parameter.data *= 2
    doubled = whole(tokens, use_cache=False).logits[0].detach()
    torch.testing.assert_close(replayed.tail(CALLS[0], apart), doubled, atol=1e-4, rtol=1e-4)
