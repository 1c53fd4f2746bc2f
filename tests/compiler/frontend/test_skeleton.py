"""A model built from its configuration alone: what comes from the checkpoint has no values, the rest is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from llmc.compiler.frontend import skeleton
from llmc.compiler.frontend.skeleton import build_skeleton
from llmc.errors import CheckpointError
from tests.compiler import tiny


class Odd(nn.Module):
    """A model with a buffer that its rule writes, one of checkpoints, dropout, and maybe one that is nobody's."""

    base_model = property(lambda self: self)

    def __init__(self, orphan: bool) -> None:
        super().__init__()
        self.scale = nn.Buffer(torch.tensor(0.0), persistent=False)
        self.stored = nn.Buffer(torch.ones(3))
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        if orphan:
            self.orphan = nn.Buffer(torch.ones(2), persistent=False)

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            self.scale.fill_(8.0)


def built(monkeypatch: pytest.MonkeyPatch, *, orphan: bool) -> nn.Module:
    def from_config(*_: Any, **__: Any) -> nn.Module:
        return Odd(orphan)

    monkeypatch.setattr(skeleton.AutoModelForCausalLM, "from_config", from_config)
    return build_skeleton(tiny.config("llama"))


def test_buffers_are_computed_by_the_models_own_rule_and_parameters_have_no_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = built(monkeypatch, orphan=False)
    assert {name: float(b) for name, b in model.named_buffers()} == {"scale": 8.0}
    assert all(p.is_meta for p in model.parameters())


def test_a_buffer_that_checkpoints_hold_is_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "stored" in dict(built(monkeypatch, orphan=False).named_parameters())


def test_dropout_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(isinstance(m, nn.Dropout) for m in built(monkeypatch, orphan=False).modules())


def test_a_buffer_that_nothing_computes_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="Odd holds a buffer 'orphan' that no checkpoint has and no rule"):
        built(monkeypatch, orphan=True)


def test_rotary_frequencies_are_transformers_own() -> None:
    model: Any = build_skeleton(tiny.config("llama"))
    assert torch.equal(model.model.rotary_emb.inv_freq, tiny.model("llama").model.rotary_emb.inv_freq)


@pytest.mark.parametrize("change", [{"rope_theta": None}, {"rope_parameters": None, "rope_theta": None}])
def test_a_configuration_that_transformers_cannot_build_is_refused_with_what_is_null_in_it(
    change: dict[str, Any],
) -> None:
    said = "transformers cannot build the llama model of this configuration: .*; null in it, .*rope_theta"
    with pytest.raises(CheckpointError, match=said):
        build_skeleton({**tiny.config("llama"), **change})


def test_numbers_that_transformers_cannot_compute_with_are_refused() -> None:
    with pytest.raises(CheckpointError, match="is not a valid llama configuration: integer modulo by zero"):
        build_skeleton({**tiny.config("llama"), "num_attention_heads": 0})
    rope = {"rope_type": "default", "rope_theta": "much"}
    with pytest.raises(CheckpointError, match=r"cannot build the llama model of this configuration: [^;]*$"):
        build_skeleton({**tiny.config("llama"), "rope_parameters": rope})


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_an_attention_package_that_a_configuration_names_is_not_imported(key: str) -> None:
    build_skeleton({**tiny.config("llama"), key: "flash_attention_2"})
