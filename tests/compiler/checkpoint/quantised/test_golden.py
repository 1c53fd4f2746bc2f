"""Matrices that the formats' own libraries packed are read as these read them, to the bit (../../data/README.md)."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from llmc.compiler.checkpoint import open_checkpoint

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "quantised.json").read_text())
NAME = "model.layers.0.mlp.down_proj.weight"


def tensor(described: dict[str, Any]) -> torch.Tensor:
    data = bytearray(base64.b64decode(described["data"]))
    return torch.frombuffer(data, dtype=getattr(torch, described["dtype"])).reshape(described["shape"])


@pytest.mark.parametrize("case", list(GOLDEN))
def test_what_the_library_packed_is_read_as_the_library_reads_it(case: str, tmp_path: Path) -> None:
    golden = GOLDEN[case]
    save_file({name: tensor(t) for name, t in golden["tensors"].items()}, tmp_path / "model.safetensors")
    config = {"model_type": "llama", "quantization_config": golden["config"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensor_names() == [NAME]
    assert checkpoint.shape(NAME) == (16, 32)
    assert "quantization_config" not in checkpoint.config
    wanted = tensor(golden["values"]).numpy()
    np.testing.assert_array_equal(checkpoint.tensor(NAME), wanted)
    form, blocks = checkpoint.stored_form(NAME), checkpoint.quantised_blocks(NAME)
    if form is None:
        assert blocks is None and checkpoint.unkept(NAME) == "float8"
        return
    assert blocks is not None and checkpoint.unkept(NAME) is None
    assert (form.bits, form.block) == (blocks.bits, blocks.block)
    np.testing.assert_array_equal(blocks.dequantise(), wanted)
    np.testing.assert_array_equal(blocks.cut(16).dequantise(), wanted)
