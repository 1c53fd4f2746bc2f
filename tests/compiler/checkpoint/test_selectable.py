"""LoRA adapters that requests choose: their matrices side by side, against the model that each is merged into."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from llmc.compiler.checkpoint import map_paths, open_checkpoint, read_config, with_adapters
from llmc.compiler.checkpoint.adapter_layout import ALIGNED, AdapterLayout
from llmc.compiler.checkpoint.lora import SelectableCheckpoint
from llmc.compiler.frontend.real_model import load_real_model, put_parameter
from llmc.compiler.frontend.skeleton import MASKS, build_skeleton
from llmc.compiler.pipeline.provenance import model_name
from llmc.errors import CheckpointError
from tests.adapters import with_choices, write_lora
from tests.compiler import tiny

IDS = torch.tensor([[3, 5, 9, 20, 7, 1]])
FIRST = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj", "model.layers.1.mlp.down_proj")
SECOND = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.up_proj")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("tiny") / "model", "llama")


@pytest.fixture(scope="module")
def chosen(model: Path) -> SelectableCheckpoint:
    """Of two adapters with ranks and modules of their own."""
    folder = model.parent
    adapters = {
        "one": write_lora(folder / "one", model, FIRST, seed=1, r=3, size=0.3, lora_alpha=5),
        "two": write_lora(folder / "two", model, SECOND, seed=2, r=5, size=0.3, use_rslora=True),
    }
    opened = open_checkpoint(with_choices(model, adapters))
    assert isinstance(opened, SelectableCheckpoint)
    return opened


def test_each_choice_is_the_model_that_the_adapter_is_merged_into(chosen: SelectableCheckpoint) -> None:
    model, names = build_skeleton(chosen.config), set(chosen.tensor_names())
    for name, parameter in model.state_dict().items():
        if name in names:
            filled = np.empty(tuple(parameter.shape), np.float32)
            chosen.fill(name, filled)
            put_parameter(model, name, torch.from_numpy(filled))
    model.tie_weights()
    logits = []
    for number in range(3):
        MASKS.set(model.adapter_masks(torch.full(IDS.shape, number)))
        logits.append(model(IDS).logits.detach())
        wanted = load_real_model(chosen.of_adapter(number))(IDS).logits.detach()
        torch.testing.assert_close(logits[-1], wanted, rtol=1e-4, atol=1e-4)
    assert min((a - b).abs().max() for a, b in pairwise(logits)) > 0.1


def test_modules_of_one_input_share_what_they_multiply_it_by(chosen: SelectableCheckpoint) -> None:
    layout = AdapterLayout.of(chosen.config)
    assert layout == chosen.layout
    assert layout is not None
    group = layout.group("model.layers.0.self_attn.k_proj")
    assert group is not None
    assert group.ranks == (6, 5), "of q and v, three columns each of the first; of the second q's alone"
    assert group.columns == ALIGNED
    assert layout.group("model.layers.1.mlp.up_proj").ranks == (0, 5)  # type: ignore[union-attr]
    low = [chosen.tensor(f"model.layers.0.self_attn.{name}_proj.lora_A.weight") for name in "qkv"]
    assert all(np.array_equal(low[0], other) for other in low)
    names = set(chosen.tensor_names())
    shared = [layout.held_as(f"model.layers.1.self_attn.{name}_proj.lora_A.weight", names) for name in "qkvo"]
    assert shared == [f"model.layers.1.self_attn.{name}_proj.lora_A.weight" for name in "qqqo"]


def test_no_adapter_decides_how_another_is_rounded(chosen: SelectableCheckpoint) -> None:
    """Of a block of codes the largest value is 1, whoever's it is."""
    high = chosen.tensor("model.layers.0.self_attn.q_proj.lora_B.weight")
    largest = np.abs(high).max(0)
    assert set(np.round(largest, 6)) == {0.0, 1.0}


def test_what_it_is_called(chosen: SelectableCheckpoint, model: Path) -> None:
    assert chosen.name == open_checkpoint(model).name, "the base's"
    assert [(c.name, c.root, c.rank) for c in chosen.choices] == [("one", "one", 3), ("two", "two", 5)]
    assert model_name(chosen.requested) == "model::adapter=one=one::adapter=two=two"
    assert map_paths("m::lora=a::adapter=n=b", str.upper) == "M::lora=A::adapter=n=B"
    assert read_config(chosen.requested) == chosen.config
    swapped = with_adapters(str(model), choices=[("two", model.parent / "one"), ("one", model.parent / "two")])
    assert open_checkpoint(swapped).config == chosen.config, "names are no part of what is traced"
    assert open_checkpoint(with_choices(model, {"one": model.parent / "one"})).digest() != chosen.digest()


def test_some_are_merged_and_others_chosen(model: Path, chosen: SelectableCheckpoint) -> None:
    both = open_checkpoint(with_adapters(str(model), [model.parent / "one"], [("two", model.parent / "two")]))
    name = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_array_equal(both.tensor(name), chosen.of_adapter(1).tensor(name))
    assert [choice.name for choice in both.choices] == ["two"]


# Bad input

BAD: dict[str, tuple[dict[str, Any], Callable[[dict[str, torch.Tensor]], object], str]] = {
    "magnitudes": ({"use_dora": True}, lambda _: None, r"magnitudes \(use_dora\), which no request can choose.*--lora"),
    "a tensor in place of the model's": (
        {}, lambda t: t.update({"base_model.model.model.norm.weight": torch.ones(64)}), "another model.norm.weight",
    ),
    "a bias": (
        {"lora_bias": True},
        lambda t: t.update({f"base_model.model.{FIRST[0]}.lora_B.bias": torch.ones(64)}), "a bias of model.layers.0",
    ),
    "an embedding": (
        {}, lambda t: t.update({
            "base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 257),
            "base_model.model.model.embed_tokens.lora_embedding_B": torch.ones(64, 2),
        }), "an embedding, model.embed_tokens",
    ),
    "transposed": ({"fan_in_fan_out": True}, lambda _: None, "transposed weights"),
    "nothing": ({}, lambda t: [t.pop(n) for n in list(t)], "it has no product"),
    "no rank": (
        {}, lambda t: t.update({n: x[:0] if n.endswith("A.weight") else x[:, :0] for n, x in t.items()}),
        "of another base model, or damaged",
    ),
    "another width": (
        {}, lambda t: t.update({n: torch.ones(3, 7) for n in t if n.endswith("A.weight")}), "of another base model",
    ),
    "another layer": (
        {}, lambda t: t.update({n.replace("layers.1", "layers.9"): t.pop(n) for n in list(t)}),
        r"it changes model.layers.9.\S+.weight, but .* has no such tensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_chosen_is_refused(tmp_path: Path, model: Path, case: str) -> None:
    config, change, words = BAD[case]
    adapter = write_lora(tmp_path / "bad", model, FIRST, r=3, **config)
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(with_choices(model, {"bad": adapter}))


@pytest.mark.parametrize("name", ["model", "", "two words", "x" * 201])
def test_a_name_that_is_none(model: Path, chosen: SelectableCheckpoint, name: str) -> None:
    words = "the base model is called that" if name == "model" else "cannot be the name of an adapter"
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(with_choices(model, {name: model.parent / "one"}))


def test_two_of_one_name(model: Path, chosen: SelectableCheckpoint) -> None:
    twice = with_adapters(str(model), choices=[("x", model.parent / "one"), ("x", model.parent / "two")])
    with pytest.raises(CheckpointError, match="two adapters are called 'x'"):
        open_checkpoint(twice)
