"""Layers with recurrent state: operators with their reference definitions, which replace transformers' functions while
a step is traced.

Each takes the state of every row before the step and returns the state after the row's last live token. Tokens from
new_lengths[b] on are padding and change nothing. The state of a row without a past (past_lengths[b] = 0) counts as
zeros, whatever it holds. Outputs at padding are finite and unused. The definitions here go token by token; chunked.py
computes the same with matmuls.

Shapes: B rows, Q new tokens; states are float32.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from llmc.compiler.frontend.chunked import NORM_EPS

if TYPE_CHECKING:
    from llmc.compiler.frontend.attention import TraceState


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


_MARK = "_llmc_replaces"


class StateCache:
    """The cache interface for layers with recurrent state, whose tensors are named "conv" and "recurrent"."""

    def __init__(self, states: TraceState) -> None:
        self._states = states
        self._layer = 0

    @property
    def lengths(self) -> tuple[Tensor, Tensor]:
        return self._states.past_lengths, self._states.new_lengths

    def get_conv_state(self, layer: int, state_idx: int = 0) -> Tensor | None:
        return None

    def update_conv_state(self, x: Tensor, layer: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Return the new tokens only: the convolution that follows reads the state itself."""
        _require_one(state_idx)
        self._layer = layer
        return x

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> Tensor | None:
        """None, which makes a layer take its branch for many tokens even for one. `recurrent` gives it the state."""
        _require_one(state_idx)
        self._layer = layer
        return None

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        _require_one(state_idx)
        self._states.keep_state(layer_idx, "recurrent", state)
        return state

    def is_recording_past(self, *_: Any) -> bool:
        return False

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        """Convolution of the layer that called `update_conv_state`: x [B, C, Q], weight [C, K]."""
        held = self._states.state(self._layer, "conv")
        if held is None:
            held = x.new_zeros(x.shape[0], weight.shape[1] - 1, x.shape[1])
        out, kept = torch.ops.llmc.causal_conv(x.transpose(1, 2), weight, bias, held, *self.lengths, silu)
        self._states.keep_state(self._layer, "conv", kept)
        return out.transpose(1, 2)

    def recurrent(self, *shape: Any) -> Tensor:
        """State that the layer's scan starts from, zeros of `shape` without a past."""
        held = self._states.state(self._layer, "recurrent")
        return self.lengths[0].new_zeros(shape, dtype=torch.float32) if held is None else held


STATES: ContextVar[StateCache] = ContextVar("llmc_state_cache")


def _require_one(state_idx: int) -> None:
    if state_idx:
        raise NotImplementedError("a layer with several recurrent states of one kind")


def _conv(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    silu = activation in ("silu", "swish")
    out = STATES.get().convolve(hidden_states, weight, bias, silu)
    return out if activation is None or silu else ACT2FN[activation](out)


def _delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    cache = STATES.get()
    shape = (value.shape[0], value.shape[2], key.shape[3], value.shape[3])
    built: tuple[Tensor, Tensor] = torch.ops.llmc.gated_delta(
        query, key, value, g.float(), beta.float(), cache.recurrent(*shape), *cache.lengths,
        use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return built


def _mamba2(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    cache = STATES.get()
    step = _step_size(dt, dt_bias, dt_softplus)
    if tuple(dt_limit) != (0.0, float("inf")):
        step = step.clamp(dt_limit[0], dt_limit[1])
    shape = (hidden_states.shape[0], *hidden_states.shape[2:], B.shape[3])
    out, state = torch.ops.llmc.state_scan(
        hidden_states, step, A, B, C, cache.recurrent(*shape),
        *cache.lengths,
    )  # fmt: skip
    return (out if D is None else out + hidden_states * D[:, None]), state


def _mamba(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mamba 1: every channel is a head of one value, and each column of its state decays at its own rate."""
    cache = STATES.get()
    x = hidden_states.transpose(1, 2)
    shape = (x.shape[0], A.shape[0], 1, A.shape[1])
    out, state = torch.ops.llmc.state_scan(
        x.unsqueeze(-1), _step_size(dt.transpose(1, 2), delta_bias, delta_softplus), A, B.transpose(1, 2).unsqueeze(2),
        C.transpose(1, 2).unsqueeze(2), cache.recurrent(*shape), *cache.lengths,
    )  # fmt: skip
    out = out.squeeze(-1)
    out = (out if D is None else out + x * D).transpose(1, 2)
    return (out if z is None else out * torch.nn.functional.silu(z)), state


def _step_size(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    step = dt.float() if bias is None else dt.float() + bias.float()
    return torch.nn.functional.softplus(step) if softplus else step


REPLACED: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _conv,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba,
}


_RECOMPOSE = "recomposition_frequencies"
"""Method that assigns each rotary frequency one of a token's three positions, in place (qwen3_5)."""


def _of_text(frequencies: Tensor) -> Tensor:
    """Rotary frequencies of text tokens, whose three positions are equal: [3, B, Q, D / 2] → [B, Q, D]."""
    return torch.cat((frequencies[0], frequencies[0]), -1)


def replace_functions(model: nn.Module) -> None:
    """Replace the functions in the files of `model`'s classes; a second call changes nothing.

    transformers 5.23 has one function for each computation, under the same name in the file of every model that needs
    it. A layer gets its recurrent state from the cache (`StateCache`), calls the functions for many tokens, and returns
    the new state. The same functions run decode, as a step of one token. They stay replaced: outside of tracing, and in
    other threads, they call the originals.

    Rotations of `model` itself, which is only traced, become those of text.
    """
    for file in {type(module).__module__ for module in model.modules()}:
        for name, built in REPLACED.items():
            original = getattr(sys.modules[file], name, None)
            if original is not None and not hasattr(original, _MARK):
                setattr(sys.modules[file], name, _while_tracing(built, original))
    for module in model.modules():
        if hasattr(module, _RECOMPOSE):
            setattr(module, _RECOMPOSE, _of_text)


def _while_tracing(built: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (original if STATES.get(None) is None else built)(*args, **kwargs)

    setattr(chosen, _MARK, original)
    return chosen
