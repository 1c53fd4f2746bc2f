"""Experts in dialects: how the traced program sends each token through the experts that were chosen for it.

`fused`     operators `llmc::expert_linear`, one a matrix, for compilers with kernels that read chosen experts only.
others      every expert on every token, and nothing of those that were not chosen counts: plain tensor operators of
            static shapes, in which no operator depends on what a tensor holds. Portable to any compiler.

Both follow transformers' contract of an experts function (transformers 5.23, integrations/moe.py): hidden states
[T, H], the ids of the chosen experts [T, k] and their weights [T, k] → [T, H].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from llmc.compiler.frontend.attention import attention_name


@torch.library.custom_op("llmc::expert_linear", mutates_args=())
def expert_linear(x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, transposed: bool) -> Tensor:
    """Each token's products with the matrices of the experts chosen for it: [T, k, N].

    x is [T, K], the same for all of a token's experts, or [T, k, K]; weight [E, N, K], or [E, K, N] where `transposed`;
    bias [E, N]; experts [T, k] int64. This is the reference meaning of the operator.
    """
    tokens, chosen = experts.shape
    rows = x[:, None].expand(tokens, chosen, x.shape[-1]) if x.dim() == 2 else x
    out = x.new_zeros(tokens, chosen, weight.shape[2 if transposed else 1])
    for expert in experts.unique().tolist():
        matrix = weight[expert] if transposed else weight[expert].T
        here = experts == expert
        out[here] = rows[here] @ matrix if bias is None else rows[here] @ matrix + bias[expert]
    return out


@expert_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(*experts.shape, weight.shape[2 if transposed else 1])


def _gated(module: Any, rows: Tensor) -> Tensor:
    gated: Tensor = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    return gated


def _normed(module: Any, rows: Tensor) -> Tensor:
    normed: Tensor = module.post_expert_norm(rows) if module.has_post_expert_norm else rows
    return normed


def _matrices(module: Any) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    """Weight and bias of what goes in, and of what comes out."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    into, out = (
        (getattr(module, name), getattr(module, f"{name}_bias") if module.has_bias else None)
        for name in (first, "down_proj")
    )
    return into, out


def _chosen_only(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    into, out = _matrices(module)
    rows = torch.ops.llmc.expert_linear(hidden_states, *into, top_k_index, module.is_transposed)
    rows = torch.ops.llmc.expert_linear(_gated(module, rows), *out, top_k_index, module.is_transposed)
    return (_normed(module, rows) * top_k_weights[:, :, None]).sum(1).to(hidden_states.dtype)


def _every_expert(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    def products(rows: Tensor, matrix: tuple[Tensor, Tensor | None]) -> Tensor:
        weight, bias = matrix
        out = torch.matmul(rows, weight if module.is_transposed else weight.transpose(1, 2))
        return out if bias is None else out + bias[:, None]

    into, out = _matrices(module)
    chosen = top_k_index[:, :, None] == torch.arange(into[0].shape[0])
    shares = torch.where(chosen, top_k_weights[:, :, None], 0.0).sum(1).transpose(0, 1)[:, :, None]
    rows = _normed(module, products(_gated(module, products(hidden_states[None], into)), out))
    # an expert may overflow on tokens that it never sees, and 0 × infinity is NaN: so it is replaced, not weighted by 0
    return (torch.where(shares != 0, rows, 0.0) * shares).sum(0).to(hidden_states.dtype)


def registered(name: str) -> bool:
    """Whether transformers knows a function for experts under this name."""
    return name in ALL_EXPERTS_FUNCTIONS


ALL_EXPERTS_FUNCTIONS.register(attention_name("fused"), _chosen_only)
ALL_EXPERTS_FUNCTIONS.register(attention_name("read_only"), _every_expert)
ALL_EXPERTS_FUNCTIONS.register(attention_name("two_part"), _every_expert)
