"""Writes tiny quantised checkpoints in the layouts that formats describe, and says what they stand for.

A packer makes the stored tensors of a module from its weight [N, K], and float64 values code by code from the same
numbers, by the format's formula. None of it is llmc's own code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.compiler import tiny

Array = NDArray[Any]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Values = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Packed:
    tensors: dict[str, Tensor]
    values: Array


Packer = Callable[[Array], Packed]
"""From a weight [N, K] to stored tensors by the last part of their name, and the values that they stand for."""


def write(
    folder: Path, stated: Mapping[str, Any], pack: Packer | Mapping[str, Packer], case: str = tiny.WIDE,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> Values:  # fmt: skip
    """A folder whose projections are packed, all alike or by name; returns the values of all tensors of the model."""
    path = tiny.write_model(folder, case) / "model.safetensors"
    built, values = dict[str, Tensor](), Values()
    for name, tensor in load_file(path).items():
        module = name.removesuffix(".weight")
        last = module.rpartition(".")[2]
        packer = (pack.get(last) if isinstance(pack, Mapping) else pack) if last in PROJECTIONS else None
        if packer is None:
            built[name], values[name] = tensor, tensor.numpy()
            continue
        packed = packer(tensor.numpy().astype(np.float64))
        built |= {f"{module}.{part}": t.contiguous() for part, t in packed.tensors.items()}
        values[name] = packed.values.astype(np.float32)
    save_file(change(built), path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": dict(stated)}))
    return values


@dataclass(frozen=True)
class QuantizedArray:
    """value[n, k] = scale[n, g[k]] · (code[n, k] − zero[n, g[k]]), scales float16 numbers."""

    quantized: Array
    scale: Array
    zero: Array
    order: Array

    def values(self) -> Array:
        return self.scale[:, self.order] * (self.quantized - self.zero[:, self.order])


def quantise(
    weight: Array, bits: int, group: int, symmetric: bool, order: Array | None = None, least: int = 0,
    dtype: torch.dtype = torch.float16,
) -> QuantizedArray:  # fmt: skip
    """Rounded to nearest within each group's extremes. Zero points are at least `least`."""
    rows, width = weight.shape
    size = width if group == -1 else group
    order = np.arange(width) // size if order is None else order
    top = (1 << bits) - 1
    scale, zero = np.empty((rows, width // size)), np.empty((rows, width // size))
    for g in range(width // size):
        part = weight[:, order == g]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            scale[:, g], zero[:, g] = 2 * np.maximum(-low, high) / top, 1 << (bits - 1)
        else:
            scale[:, g] = (high - low) / top
            zero[:, g] = np.clip(np.rint(-low / scale[:, g]), least, top)
    scale = torch.from_numpy(scale).to(dtype).double().numpy()
    quantized = np.clip(np.rint(weight / scale[:, order] + zero[:, order]), 0, top)
    return QuantizedArray(quantized, scale, zero, order)


def words(quantized: Array, bits: int) -> Tensor:
    """Rows of codes as 32-bit words, bit by bit, the first code in the lowest bits."""
    built = []
    for row in quantized.astype(int):
        whole = sum(int(code) << (bits * at) for at, code in enumerate(row))
        count = -(-len(row) * bits // 32)
        built.append([(whole >> (32 * at)) & 0xFFFFFFFF for at in range(count)])
    return torch.from_numpy(np.array(built, np.uint32).view(np.int32))


def gptq(
    bits: int = 4, group: int = 32, *, symmetric: bool = True, version: int = 1, act_order: bool = False,
    ordered: bool = True, whole_groups: bool = False, seed: int = 0,
) -> Packer:  # fmt: skip
    def pack(weight: Array) -> Packed:
        width = weight.shape[1]
        order = np.arange(width) // (width if group == -1 else group)
        if act_order:
            order = np.random.default_rng(seed).permutation(order)
        if whole_groups:
            order = order[::-1].copy()
        built = quantise(weight, bits, group, symmetric, order)
        less = version == 1 and bits == 3  # of each alone; else of whole words
        zeros = words((built.zero.T - less) % (1 << bits), bits).numpy().view(np.uint32)
        if version == 1 and not less:
            zeros = zeros - np.uint32(sum(1 << at for at in range(0, 32, bits)))
        tensors = {
            "qweight": words(built.quantized, bits).T,
            "qzeros": torch.from_numpy(zeros.view(np.int32)),
            "scales": torch.from_numpy(built.scale.T).half(),
        }
        if ordered:
            tensors["g_idx"] = torch.from_numpy(order.astype(np.int32))
        return Packed(tensors, built.values())

    return pack


def awq(group: int = 32) -> Packer:
    def pack(weight: Array) -> Packed:
        built = quantise(weight, 4, group, symmetric=False)

        def packed(quantized: Array) -> Tensor:
            """[.., N] → int32 [.., N/8]."""
            total = np.zeros((len(quantized), quantized.shape[1] // 8), np.uint32)
            for at, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                total |= quantized[:, column::8].astype(np.uint32) << np.uint32(4 * at)
            return torch.from_numpy(total.view(np.int32))

        tensors = {
            "qweight": packed(built.quantized.T), "qzeros": packed(built.zero.T),
            "scales": torch.from_numpy(built.scale.T).half(),
        }  # fmt: skip
        return Packed(tensors, built.values())

    return pack


def pack_quantized(
    bits: int = 4, group: int = 32, *, symmetric: bool = True, dtype: torch.dtype = torch.bfloat16,
    act_order: bool = False, unset: bool = False,
) -> Packer:  # fmt: skip
    def pack(weight: Array) -> Packed:
        order = None
        if act_order:
            order = np.random.default_rng(0).permutation(np.arange(weight.shape[1]) // group)
        built = quantise(weight, bits, group, symmetric, order, dtype=dtype)
        tensors = {
            "weight_packed": words(built.quantized, bits), "weight_scale": torch.from_numpy(built.scale).to(dtype),
            "weight_shape": torch.tensor(weight.shape),
        }  # fmt: skip
        if not symmetric:
            tensors["weight_zero_point"] = words(built.zero.T, bits).T
        if act_order or unset:
            tensors["weight_g_idx"] = torch.from_numpy(np.where(unset, -1, built.order).astype(np.int32))
        return Packed(tensors, built.values())

    return pack


def int_quantized(group: int = -1, *, symmetric: bool = True, dtype: torch.dtype = torch.bfloat16) -> Packer:
    def pack(weight: Array) -> Packed:
        built = quantise(weight, 8, group, symmetric, dtype=dtype)
        tensors = {
            "weight": torch.from_numpy(built.quantized - 128).to(torch.int8),
            "weight_scale": torch.from_numpy(built.scale).to(dtype),
        }
        if not symmetric:
            tensors["weight_zero_point"] = torch.from_numpy(built.zero - 128).to(torch.int8)
        return Packed(tensors, built.values())

    return pack


def float8(tile: tuple[int, int] | None, name: str, dtype: torch.dtype = torch.float32) -> Packer:
    """Tiles [rows, inputs] that share a scale, or one of all; `name`: what the scales are called."""

    def pack(weight: Array) -> Packed:
        rows, width = tile or weight.shape
        grid = -(-weight.shape[0] // rows), -(-weight.shape[1] // width)
        scale = np.empty(grid)
        for i in range(grid[0]):
            for j in range(grid[1]):
                scale[i, j] = np.abs(weight[i * rows : (i + 1) * rows, j * width : (j + 1) * width]).max() / 448
        scales = torch.from_numpy(scale).to(dtype)
        each = np.repeat(np.repeat(scales.double().numpy(), rows, 0), width, 1)[: weight.shape[0], : weight.shape[1]]
        quantized = torch.from_numpy(weight / each).to(torch.float8_e4m3fn)
        values = quantized.float().numpy() * each.astype(np.float32)
        return Packed({"weight": quantized, name: scales if tile else scales.reshape(())}, values)

    return pack


def float4() -> Packer:
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def pack(weight: Array) -> Packed:
        rows, width = weight.shape
        blocks = weight.reshape(rows, -1, 16)
        whole = np.float32(448 * 6 / np.abs(weight).max())
        scale = torch.from_numpy(np.abs(blocks).max(-1) / 6 * whole).to(torch.float8_e4m3fn)
        each = (scale.float().numpy() / whole)[..., None]
        nearest = np.abs(np.abs(blocks / each)[..., None] - levels).argmin(-1)
        quantized = (nearest + 8 * (blocks < 0)).reshape(rows, width).astype(np.uint8)
        values = (levels[nearest].astype(np.float32) * np.where(blocks < 0, -1, 1)).astype(np.float32) * each
        tensors = {
            "weight_packed": torch.from_numpy(quantized[:, ::2] | quantized[:, 1::2] << 4), "weight_scale": scale,
            "weight_global_scale": torch.tensor([whole]),
        }  # fmt: skip
        return Packed(tensors, values.reshape(rows, width))

    return pack


def scheme(layout: str, weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """compressed-tensors' quantization_config of one group."""
    group = {"targets": ["Linear"], "weights": dict(weights), **more}
    return {
        "quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, "quantization_status": "compressed",
    }  # fmt: skip


def whole(bits: int, group: int, symmetric: bool = True) -> dict[str, Any]:
    """Weights of whole numbers as compressed-tensors states them."""
    strategy = "channel" if group == -1 else "group"
    size = None if group == -1 else group
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": size}


def gptq_config(bits: int = 4, group: int = 32, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group, "sym": True, "desc_act": False,
        "checkpoint_format": "gptq", **more,
    }  # fmt: skip


def awq_config(group: int = 32, **more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm", **more}


FLOAT8_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True}
W8A8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
CASES: dict[str, tuple[dict[str, Any], Packer | Mapping[str, Packer]]] = {
    "gptq 4 bits, groups of 32": (gptq_config(), gptq()),
    "gptq 4 bits, groups of 128, zero points": (gptq_config(4, 128, sym=False), gptq(4, 128, symmetric=False)),
    "gptq_v2, zero points, no g_idx": (
        gptq_config(sym=False, checkpoint_format="gptq_v2"), gptq(symmetric=False, version=2, ordered=False),
    ),
    "gptq 8 bits, groups of 64": (gptq_config(8, 64), gptq(8, 64)),
    "gptq 8 bits, rows, zero points": (gptq_config(8, -1, sym=False), gptq(8, -1, symmetric=False)),
    "gptq 3 bits": (gptq_config(3, checkpoint_format="gptq_v2"), gptq(3, version=2)),
    "gptq 2 bits, zero points": (gptq_config(2, sym=False), gptq(2, symmetric=False)),
    "gptq act-order": (gptq_config(desc_act=True), gptq(act_order=True)),
    "gptq groups in another order": (gptq_config(desc_act=True), gptq(whole_groups=True)),
    "gptq dynamic": (
        gptq_config(dynamic={"-:lm_head": {}, "+:.*down_proj": {"bits": 8, "group_size": 64}}),
        {name: gptq(8, 64) if name == "down_proj" else gptq() for name in PROJECTIONS if name != "k_proj"},
    ),
    "awq groups of 32": (awq_config(), awq()),
    "awq groups of 128": (awq_config(128), awq(128)),
    "pack-quantized 4 bits": (scheme("pack-quantized", whole(4, 32)), pack_quantized()),
    "pack-quantized 4 bits, groups of 64, zero points": (
        scheme("pack-quantized", whole(4, 64, False)), pack_quantized(4, 64, symmetric=False),
    ),
    "pack-quantized 8 bits by channel": (scheme("pack-quantized", whole(8, -1)), pack_quantized(8, -1)),
    "pack-quantized act-order": (
        scheme("pack-quantized", {**whole(4, 32, False), "actorder": "group"}),
        pack_quantized(symmetric=False, act_order=True),
    ),
    "pack-quantized without an order": (scheme("pack-quantized", whole(4, 32)), pack_quantized(unset=True)),
    "int-quantized by channel": (
        scheme("int-quantized", whole(8, -1), input_activations=W8A8), int_quantized(),
    ),
    "int-quantized by group, zero points, float32 scales": (
        scheme("int-quantized", whole(8, 64, False)), int_quantized(64, symmetric=False, dtype=torch.float32),
    ),
    "float-quantized by tensor": (
        scheme("float-quantized", {**FLOAT8_WEIGHTS, "strategy": "tensor"}), float8(None, "weight_scale"),
    ),
    "float-quantized by channel": (
        scheme("float-quantized", {**FLOAT8_WEIGHTS, "strategy": "channel"}),
        lambda weight: float8((1, weight.shape[1]), "weight_scale", torch.bfloat16)(weight),
    ),
    "naive-quantized in tiles": (
        scheme("naive-quantized", {**FLOAT8_WEIGHTS, "strategy": "block", "block_structure": [64, 32]}),
        float8((64, 32), "weight_scale"),
    ),
    "nvfp4-pack-quantized": (
        scheme(
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16},
        ),
        float4(),
    ),
    "fp8 in tiles": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, 96]},
        float8((48, 96), "weight_scale_inv"),
    ),
    "fp8 by tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, float8(None, "weight_scale")),
}  # fmt: skip
"""What is stated, and how projections are packed."""
EXACT = tuple(
    name for name in CASES if not name.startswith(("fp8", "float-", "naive-")) and not name.endswith("act-order")
)
"""Cases in which each matrix is blocks."""
