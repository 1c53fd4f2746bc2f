"""Both forms of experts compute what transformers computes, and what no token chose counts for nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from llmc.compiler.frontend.attention import attention_name
from tests.compiler import tiny


def experts(architecture: str) -> nn.Module:
    module: nn.Module = (
        tiny.model(architecture)
        .model.layers[0]
        .get_submodule("block_sparse_moe.experts" if architecture == "granitemoe" else "mlp.experts")
    )
    return module


def routed(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, and two different experts of the first five for each token, of unequal shares."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(5, generator=draw)[:2] for _ in range(tokens)])
    return torch.randn(tokens, 64, generator=draw), ids, torch.rand(tokens, 2, generator=draw)


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "granitemoe"])
@pytest.mark.parametrize("dialect", ["fused", "two_part"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_results_are_transformers_own(architecture: str, dialect: str, tokens: int) -> None:
    module, given = experts(architecture), routed(tokens)
    wanted = ALL_EXPERTS_FUNCTIONS["batched_mm"](module, *given)
    built = ALL_EXPERTS_FUNCTIONS[attention_name(dialect)](module, *given)
    torch.testing.assert_close(built, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dialect", ["fused", "two_part"])
def test_an_expert_that_overflows_on_tokens_of_others_leaves_them_alone(
    dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, given = experts("mixtral"), routed(7)
    function = ALL_EXPERTS_FUNCTIONS[attention_name(dialect)]
    wanted = function(module, *given)
    broken = module.down_proj.detach().clone()
    broken[6] = float("inf")  # of which no token takes any
    monkeypatch.setitem(module._parameters, "down_proj", nn.Parameter(broken, requires_grad=False))
    torch.testing.assert_close(function(module, *given), wanted)
