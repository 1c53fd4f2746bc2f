"""gpt-oss as it is published: experts in MXFP4, read as transformers reads them, and kept by OpenVINO."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from llmc.artifacts.bundle.manifest import read_manifest
from llmc.artifacts.store.store import Store
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.frontend.consumed import require_consumed
from llmc.compiler.frontend.real_model import load_real_model
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.compiler.targets import open_target
from llmc.compiler.targets.openvino.compression import f4kept
from llmc.errors import CheckpointError
from tests.compiler import tiny
from tests.compiler.targets.openvino.test_compression import Source, float4

GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
STATED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def in_8_bits(matrix: Tensor) -> Tensor:
    """[N, K] in whole multiples of 2⁻⁹, of which the largest in 32 neighbours is 127."""
    quantized = (matrix * 512).round().clamp(-127, 127)
    quantized[:, ::32] = 127
    return quantized / 512


def packed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with random blocks and scales in the place of each expert's matrices [E, K, N], and other matrices of
    values that 8 bits with a scale for 32 of them hold: rounding alone, so large are the scales, would choose other
    experts."""
    draw = torch.Generator().manual_seed(3)
    built = {}
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            built[name] = in_8_bits(tensor) if name.endswith("weight") and tensor.ndim == 2 else tensor
            continue
        count, width, rows = tensor.shape
        sizes = (count, rows, width // 32)
        built[f"{name}_blocks"] = torch.randint(0, 256, (*sizes, 16), dtype=torch.uint8, generator=draw)
        built[f"{name}_scales"] = torch.randint(118, 128, sizes, dtype=torch.uint8, generator=draw)
    return built


def write(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict, **config: Any) -> Path:
    path = tiny.write_model(folder, "gpt_oss") / "model.safetensors"
    save_file(change(packed(load_file(path))), path, {"format": "pt"})
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stated, "quantization_config": STATED, **config}))
    return folder


def test_blocks_and_scales_are_the_floats_that_transformers_makes_of_them(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    stored, found = load_file(folder / "model.safetensors"), open_checkpoint(folder)
    wanted = convert_moe_packed_tensors(stored[f"{GATE_UP}_blocks"], stored[f"{GATE_UP}_scales"], dtype=torch.float32)
    np.testing.assert_array_equal(found.tensor(GATE_UP), wanted.numpy())
    assert found.shape(GATE_UP) == tuple(wanted.shape)
    assert set(found.tensor_names()) == set(tiny.model("gpt_oss").state_dict())


def test_blocks_are_the_same_values_of_turned_matrices_in_openvinos_type_too(tmp_path: Path) -> None:
    found = open_checkpoint(write(tmp_path / "model"))
    form, blocks, values = found.reordered_form(GATE_UP), found.reordered_blocks(GATE_UP), found.tensor(GATE_UP)
    assert form is not None and blocks is not None and form.turned and form.table == "float4"
    turned = values.swapaxes(1, 2).reshape(-1, values.shape[1])
    np.testing.assert_array_equal(blocks.dequantise(), turned)
    np.testing.assert_array_equal(float4(f4kept([GATE_UP], Source(stored={GATE_UP: blocks}), form.block)), turned)
    assert (found.stored_form(GATE_UP), found.quantised_blocks(GATE_UP)) == (None, None)


@pytest.mark.full
def test_openvino_multiplies_quantized_weights_exactly_and_other_devices_floats(tmp_path: Path) -> None:
    write(tmp_path / "model")

    def compiled(device: str, **requested: Any) -> tuple[str, int, float]:
        bundle = tmp_path / f"{device}-{len(requested)}"
        built = compile_bundle(
            str(tmp_path / "model"), bundle, tiny.kinds_plan(),
            CompileOptions.of(device=device, **requested), Store(tmp_path / "store"), lambda event: None,
        )  # fmt: skip
        (line,) = open_target(built.device).describe(built.analysis)
        held = read_manifest(bundle)
        kernels = {digest for name, digest in held.files.items() if name.startswith("kernels-")}
        largest = max(size for digest, size in held.blobs.items() if digest not in kernels)
        judged = [built.verification, built.verification.get("accuracy", {})]
        kl = max(found.get("mean_kl", math.inf) for found in judged)
        return line.removeprefix("quantized matrices of the checkpoint: "), largest, kl

    exact: dict[str, Any] = {"activation_group_size": 0, "kv_cache_dtype": "f32"}
    kept, quantized, kl = compiled("openvino", quantize="keep", verify="all", **exact)
    widened, floats, _ = compiled("openvino", quantize="none")
    assert kept == "4 kept exactly" and widened == "0 kept exactly, 4 widened to float32"
    assert kl < 1e-7
    assert quantized < floats / 4
    own, panels, _ = compiled("onnxruntime", quantize="keep", verify="none")
    assert own == kept and panels < floats / 4
    assert compiled("onnxruntime", quantize="keep", verify="none", kernels="onnxruntime")[0] == widened


def test_the_model_is_complete_and_no_quantization_is_left_over(tmp_path: Path) -> None:
    found = open_checkpoint(write(tmp_path / "model"))
    require_consumed(found)
    load_real_model(found)


def test_extreme_scales_are_exact_and_those_that_overflow_are_refused(tmp_path: Path) -> None:
    def scaled(to: int) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
        return lambda held: (
            held
            | {
                f"{GATE_UP}_scales": torch.full_like(held[f"{GATE_UP}_scales"], to),
                f"{GATE_UP}_blocks": torch.full_like(held[f"{GATE_UP}_blocks"], 0x17),
            }
        )

    least = open_checkpoint(write(tmp_path / "least", scaled(0))).tensor(GATE_UP)
    assert sorted({float(x) for x in least.ravel()}) == [0.5 * 2.0**-127, 6 * 2.0**-127]
    with pytest.raises(CheckpointError, match="gate_up_proj holds a non-finite value"):
        open_checkpoint(write(tmp_path / "most", scaled(254))).tensor(GATE_UP)
    with pytest.raises(CheckpointError, match="gate_up_proj holds a scale of 255, which is NaN"):
        open_checkpoint(write(tmp_path / "none", scaled(255))).tensor(GATE_UP)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda held: {n: t for n, t in held.items() if n != f"{GATE_UP}_scales"}, "_blocks has no .*_scales"),
        (lambda held: held | {f"{GATE_UP}_scales": held[f"{GATE_UP}_scales"][:, :7].clone()}, r"not \[E, N, G, 16\]"),
        (lambda held: held | {f"{GATE_UP}_blocks": held[f"{GATE_UP}_blocks"].char()}, "has type I8, not U8"),
    ],
    ids=["no scales", "other sizes", "another type"],
)
def test_damaged_blocks_are_refused(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], why: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "model", change)
    with pytest.raises(CheckpointError, match=why):
        open_checkpoint(folder).tensor(GATE_UP)
