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
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

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


@pytest.mark.parametrize("exponents", [False, True], ids=["float32", "ue8m0"])
@pytest.mark.parametrize("tile", [(16, 32), (8, 16)], ids=str)
def test_float8_in_tiles_is_what_transformers_makes_of_it(
    tile: tuple[int, int], exponents: bool, tmp_path: Path
) -> None:
    """Where tiles divide the matrix: others transformers 5.23 does not take."""
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn((32, 64), generator=draw).to(torch.float8_e4m3fn)
    scale = torch.rand((32 // tile[0], 64 // tile[1]), generator=draw) * 0.01
    if exponents:
        scale = torch.randint(110, 128, scale.shape, dtype=torch.uint8, generator=draw)
    save_file({NAME: weight, f"{NAME}_scale_inv": scale}, tmp_path / "model.safetensors")
    stated = {"quant_method": "fp8", "weight_block_size": list(tile), "scale_fmt": "ue8m0" if exponents else "float"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": stated}))
    wanted = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
    np.testing.assert_array_equal(open_checkpoint(tmp_path).tensor(NAME), wanted.numpy())
