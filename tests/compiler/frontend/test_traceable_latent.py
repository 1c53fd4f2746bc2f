"""Latent attention as it is traced gives what transformers' own layers give, and leaves those alone."""

from __future__ import annotations

import copy

import pytest
import torch

from llmc.compiler.frontend.traceable import trace_latents
from tests.compiler import tiny

TOKENS = torch.tensor([[5, 80, 3, 200, 17, 9]])


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_logits_are_the_models_own(name: str) -> None:
    reference = tiny.model(name)
    wanted = reference(TOKENS, use_cache=False).logits
    changed = copy.deepcopy(reference)
    trace_latents(changed)
    torch.testing.assert_close(changed(TOKENS, use_cache=False).logits, wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(reference(TOKENS, use_cache=False).logits, wanted)


def test_layers_without_latents_stay_as_they_are() -> None:
    model = tiny.model("llama")
    before = [dict(vars(module)) for module in model.modules()]
    trace_latents(model)
    assert [vars(module).keys() for module in model.modules()] == [members.keys() for members in before]
