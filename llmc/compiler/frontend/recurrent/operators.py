"""Operators of layers with recurrent state, and their reference definitions.

Each takes the state of every row before the step and returns the state after the row's last live token. Tokens from
new_lengths[b] on are padding and change nothing. The state of a row without a past (past_lengths[b] = 0) counts as
zeros, whatever it holds. Outputs at padding are finite and unused. The definitions here go token by token; chunked.py
computes the same with matmuls.

Shapes: B rows, Q new tokens; states are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.compiler.frontend.recurrent.chunked import NORM_EPS


def _before(state: Tensor, past_lengths: Tensor) -> Tensor:
    return torch.where(past_lengths.view(-1, *[1] * (state.ndim - 1)) > 0, state, 0.0)


@torch.library.custom_op("llmc::causal_conv", mutates_args=())
def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, past_lengths: Tensor, new_lengths: Tensor,
    silu: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Convolve each channel over its last K tokens: x [B, Q, C], weight [C, K], state [B, K − 1, C] → the same shapes.

    The state holds the K − 1 tokens before the step, the latest one last.
    """
    tail = weight.shape[1] - 1
    seen = torch.cat([_before(state, past_lengths).to(x.dtype), x], 1)
    windows = seen.unfold(1, weight.shape[1], 1)
    out = (windows * weight).sum(-1) + (0.0 if bias is None else bias)
    last = new_lengths[:, None] + torch.arange(tail)
    kept = seen[torch.arange(x.shape[0])[:, None], last].to(state.dtype)
    return (torch.nn.functional.silu(out) if silu else out), kept


@causal_conv.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), state.new_empty(state.shape)


@torch.library.custom_op("llmc::gated_delta", mutates_args=())
def gated_delta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor, past_lengths: Tensor,
    new_lengths: Tensor, normalise: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gated delta rule (Yang et al., 2024, arXiv 2412.06464).

    query and key [B, Q, Hk, Dk], value [B, Q, Hv, Dv], decay (its logarithm) and beta [B, Q, Hv], state [B, Hv, Dk, Dv]
    → out [B, Q, Hv, Dv] and the new state.

    Each token decays the state, S = exp(decay) · S, corrects the value under its key, S += k ⊗ beta · (v − k · S), and
    reads it, out = q · S / √Dk. With `normalise` queries and keys have length 1.
    """
    groups = value.shape[2] // key.shape[2]
    query, key = (t.repeat_interleave(groups, 2).float() for t in (query, key))
    if normalise:
        query, key = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + NORM_EPS) for t in (query, key))
    query = query * query.shape[-1] ** -0.5
    held = _before(state, past_lengths)
    outs = []
    for i in range(query.shape[1]):
        faded = held * decay[:, i].float().exp()[..., None, None]
        missing = value[:, i].float() - torch.einsum("bhk,bhkv->bhv", key[:, i], faded)
        built = faded + torch.einsum("bhk,bhv->bhkv", key[:, i], missing * beta[:, i].float()[..., None])
        held = torch.where((i < new_lengths)[:, None, None, None], built, held)
        outs.append(torch.einsum("bhk,bhkv->bhv", query[:, i], held))
    return torch.stack(outs, 1).to(value.dtype), held.clone()


@gated_delta.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor, *_: object
) -> tuple[Tensor, Tensor]:
    return value.new_empty(value.shape), state.new_empty(state.shape)


@torch.library.custom_op("llmc::state_scan", mutates_args=())
def state_scan(
    x: Tensor, step: Tensor, rate: Tensor, write: Tensor, read: Tensor, state: Tensor, past_lengths: Tensor,
    new_lengths: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mamba's selective state space (Gu and Dao, 2023, arXiv 2312.00752; Dao and Gu, 2024, arXiv 2405.21060).

    x [B, Q, H, P], step [B, Q, H], rate [H] or [H, N], write and read [B, Q, G, N], state [B, H, P, N] → out [B, Q, H,
    P] and the new state.

    Each token decays the state, S = exp(step · rate) · S, writes, S += step · x ⊗ write, and reads, out = S · read. The
    heads of each of the G groups share `write` and `read`.
    """
    groups = x.shape[2] // write.shape[2]
    write, read = (t.repeat_interleave(groups, 2).float() for t in (write, read))
    rates = (rate if rate.ndim == 2 else rate[:, None]).float()
    held = _before(state, past_lengths)
    outs = []
    for i in range(x.shape[1]):
        faded = held * (step[:, i].float()[..., None] * rates).exp()[:, :, None]
        built = faded + torch.einsum("bhp,bhn->bhpn", x[:, i].float() * step[:, i].float()[..., None], write[:, i])
        held = torch.where((i < new_lengths)[:, None, None, None], built, held)
        outs.append(torch.einsum("bhpn,bhn->bhp", held, read[:, i]))
    return torch.stack(outs, 1).to(x.dtype), held.clone()


@state_scan.register_fake
def _(
    x: Tensor, step: Tensor, rate: Tensor, write: Tensor, read: Tensor, state: Tensor, *_: object
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), state.new_empty(state.shape)
