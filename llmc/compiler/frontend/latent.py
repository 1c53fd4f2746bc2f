"""Latent attention as it is traced: without writes in place, and without complex numbers.

transformers' layers write keys into new memory (`expand_kv`), and DeepSeek V2's rotate neighbours by complex
numbers; compilers have neither. The same sums in other operators are put in their place. Read from transformers 5.23,
models/deepseek_v2 and models/deepseek_v3. Only models that are traced are changed, so that references stay
transformers' own.
"""

from __future__ import annotations

from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

_ROTATE = "apply_rotary_emb"
"""The function by which layers rotate with complex numbers, and which layers of no other model call."""


def trace_latents(model: nn.Module) -> None:
    """Change the layers of `model` that have latents; others stay as they are."""
    for module in model.modules():
        if not hasattr(module, "expand_kv"):
            continue
        module.expand_kv = partial(_expanded, module)
        forward: Any = type(module).forward
        if _ROTATE in forward.__code__.co_names:
            own = FunctionType(
                forward.__code__, {**forward.__globals__, _ROTATE: _rotated}, forward.__name__, forward.__defaults__,
                forward.__closure__,
            )  # fmt: skip
            module.forward = partial(own, module)
            rotary: Any = model.get_submodule("model.rotary_emb")
            rotary.forward = partial(_angles, rotary)


def _expanded(module: Any, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [B, H, Q, D] and values of latents [B, 1, Q, L] and the rotated part of keys [B, 1, Q, R]."""
    batch, _, length, _ = latents.shape
    widths = [module.qk_nope_head_dim, module.v_head_dim]
    made = module.kv_b_proj(latents).view(batch, length, -1, sum(widths)).transpose(1, 2)
    keys, values = torch.split(made, widths, dim=-1)
    return torch.cat((keys, rotated.expand(-1, keys.shape[1], -1, -1)), dim=-1), values


def _angles(module: Any, x: Tensor, position_ids: Tensor) -> Tensor:
    """Cosines, then sines, [B, Q, R]: the parts of the model's complex numbers."""
    angles = position_ids[..., None].float() * module.inv_freq.to(dtype=torch.float)
    return torch.cat((angles.cos(), angles.sin()), -1) * module.attention_scaling


def _rotated(query: Tensor, key: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Neighbours (2i, 2i + 1) of [B, H, Q, R] as complex numbers, times those of `_angles`."""
    cos, sin = angles[:, None].chunk(2, -1)

    def turned(x: Tensor) -> Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(3)

    return turned(query), turned(key)
