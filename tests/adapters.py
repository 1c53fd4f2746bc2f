"""LoRA adapters of random numbers, as PEFT writes them, and a toy bundle whose requests choose one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from llmc.compiler.checkpoint import open_checkpoint, with_adapters
from llmc.compiler.verification.toy_reference import ToyReference
from tests.toy import Toy

TOY_MODULES = ("model.embed_tokens", "lm_head")
NAMES = ("loud", "quiet", "wide")


def write_lora(
    folder: Path, model: str | Path, modules: Sequence[str], *, seed: int = 1, r: int = 2, size: float = 0.5,
    **config: Any,
) -> Path:  # fmt: skip
    """An adapter of rank `r` for some modules of a checkpoint."""
    checkpoint, draw = open_checkpoint(model), np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for module in modules:
        rows, width = checkpoint.shape(f"{module}.weight")
        stem = f"base_model.model.{module}"
        tensors[f"{stem}.lora_A.weight"] = draw.normal(0, size, (r, width)).astype(np.float32)
        tensors[f"{stem}.lora_B.weight"] = draw.normal(0, size, (rows, r)).astype(np.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    stated = {"peft_type": "LORA", "r": r, "lora_alpha": r, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    return folder


def with_choices(model: str | Path, adapters: Mapping[str, Path]) -> str:
    """The name of a model whose requests choose from adapters."""
    return with_adapters(str(model), choices=list(adapters.items()))


def toy_with_adapters(folder: Path, **options: Any) -> Toy:
    """A toy bundle with the adapters NAMES, of ranks 1, 2 and 3; its `model` is the name that opens all of it."""
    toy = Toy.make(folder)
    built = {
        name: write_lora(folder / name, toy.model, TOY_MODULES, seed=number, r=number)
        for number, name in enumerate(NAMES, 1)
    }
    toy.model = with_choices(toy.model, built)  # type: ignore[assignment]
    toy.compile(**options)
    return toy


def references(model: str | Path) -> list[ToyReference]:
    """Of the model without an adapter, and with each merged into it."""
    checkpoint = open_checkpoint(model)
    return [ToyReference(checkpoint.of_adapter(number)) for number in range(len(checkpoint.choices) + 1)]
