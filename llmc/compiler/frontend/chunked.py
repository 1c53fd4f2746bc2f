"""The recurrent operators as matmuls at fixed sizes, for a device's compiler.

Tokens are processed a chunk at a time, each chunk starting from the state of the one before. recurrent.py names the
papers with the rules. All functions run over torch or jax.numpy, passed as `xp`, and use only functions that both have.
"""

from __future__ import annotations

from typing import Any

Array = Any
CHUNK = 64
"""Tokens of a chunk, as in transformers' gated delta rule."""
_SCANNED = 16
"""Tokens of a chunk where each state column decays at its own rate: all states of a chunk are held at once."""
NORM_EPS = 1e-6
"""Constant that the gated delta rule adds to squared lengths of queries and keys (transformers 5.23, qwen3_next,
`l2norm`)."""
_NEVER = -1e30
"""A logarithm whose exponential is 0."""


def causal_conv(
    xp: Any, x: Array, weight: Array, bias: Array | None, state: Array, past_lengths: Array, new_lengths: Array,
    silu: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """`recurrent.causal_conv` at fixed sizes."""
    query, width = x.shape[1], weight.shape[1]
    seen = xp.concatenate([_before(xp, state, past_lengths), x], 1)
    out = sum(seen[:, i : i + query] * weight[:, i] for i in range(width))
    out = out if bias is None else out + bias
    # the state after n live tokens starts at token n: a row of ones and zeros selects each of its rows
    offsets = new_lengths[:, None] + xp.arange(width - 1)[None]
    picked = offsets[:, :, None] == xp.arange(width - 1 + query)[None, None]
    kept = xp.where(picked[..., None], seen[:, None], 0.0).sum(2)
    return (out / (1.0 + xp.exp(-out)) if silu else out), kept


def gated_delta(
    xp: Any, query: Array, key: Array, value: Array, decay: Array, beta: Array, state: Array, past_lengths: Array,
    new_lengths: Array, normalise: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """`recurrent.gated_delta` at fixed sizes."""
    length, heads = value.shape[1], value.shape[2]
    live = (xp.arange(length)[None] < new_lengths[:, None])[:, :, None]
    query, key = (_by_head(xp, t, heads) for t in (query, key))
    if normalise:
        query, key = (t * (1.0 / xp.sqrt((t * t).sum(-1)[..., None] + NORM_EPS)) for t in (query, key))
    query = query * query.shape[-1] ** -0.5
    value = _by_head(xp, value, heads)
    decay, beta = (xp.where(live, t, 0.0).swapaxes(1, 2) for t in (decay, beta))
    held = _before(xp, state, past_lengths)
    size = min(CHUNK, 1 << (length - 1).bit_length())
    query, key, value, decay, beta = (_padded(xp, t, 2, size) for t in (query, key, value, decay, beta))
    lower = xp.tril(xp.ones((size, size))) > 0
    outs = []
    for start in range(0, query.shape[2], size):
        q, k, v, g, b = (t[:, :, start : start + size] for t in (query, key, value, decay, beta))
        faded = xp.cumsum(g, -1)
        between = xp.exp(xp.where(lower, faded[..., :, None] - faded[..., None, :], _NEVER))
        since = xp.exp(faded)[..., None]
        scaled = k * b[..., None]
        keys = k.swapaxes(-1, -2)
        solved = _inverse(xp, xp.tril(scaled @ keys * between, -1))
        built = solved @ (v * b[..., None]) - solved @ (scaled * since) @ held
        outs.append((q * since) @ held + (q @ keys * between) @ built)
        until = xp.exp(faded[..., -1:] - faded)[..., None]
        held = held * since[..., -1:, :] + (k * until).swapaxes(-1, -2) @ built
    return xp.concatenate(outs, 2)[:, :, :length].swapaxes(1, 2), held


def state_scan(
    xp: Any, x: Array, step: Array, rate: Array, write: Array, read: Array, state: Array, past_lengths: Array,
    new_lengths: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """`recurrent.state_scan` at fixed sizes."""
    length, heads = x.shape[1], x.shape[2]
    live = (xp.arange(length)[None] < new_lengths[:, None])[:, :, None]
    step = xp.where(live, step, 0.0).swapaxes(1, 2)
    write, read = (_by_head(xp, t, heads) for t in (write, read))
    x = _by_head(xp, x, heads) * step[..., None]
    held = _before(xp, state, past_lengths)
    each = rate.ndim == 2
    size = min(_SCANNED if each else CHUNK, 1 << (length - 1).bit_length())
    x, step, write, read = (_padded(xp, t, 2, size) for t in (x, step, write, read))
    lower = xp.tril(xp.ones((size, size))) > 0
    outs = []
    for start in range(0, x.shape[2], size):
        u, dt, b, c = (t[:, :, start : start + size] for t in (x, step, write, read))
        if each:
            out, held = _columns(xp, u, dt[..., None] * rate[:, None], b, c, held)
            outs.append(out)
            continue
        faded = xp.cumsum(dt * rate[:, None], -1)
        between = xp.exp(xp.where(lower, faded[..., :, None] - faded[..., None, :], _NEVER))
        since = xp.exp(faded)[..., None]
        until = xp.exp(faded[..., -1:] - faded)[..., None]
        outs.append((c @ b.swapaxes(-1, -2) * between) @ u + (c * since) @ held.swapaxes(-1, -2))
        held = held * since[..., -1:, :] + u.swapaxes(-1, -2) @ (b * until)
    return xp.concatenate(outs, 2)[:, :, :length].swapaxes(1, 2), held


def _columns(xp: Any, u: Array, fading: Array, write: Array, read: Array, held: Array) -> tuple[Array, Array]:
    """A chunk whose state columns each decay at their own rate: u [B, H, C, P], fading [B, H, C, N], state [B, H, P,
    N]. Doubling computes the states: after round r each holds the contribution of the last 2ʳ tokens."""
    size = u.shape[2]
    keep = xp.exp(fading)[:, :, :, None]
    built = u[..., None] * write[:, :, :, None]
    shift = 1
    while shift < size:
        built = xp.concatenate(
            [built[:, :, :shift], built[:, :, shift:] + keep[:, :, shift:] * built[:, :, :-shift]], 2
        )
        keep = xp.concatenate([keep[:, :, :shift], keep[:, :, shift:] * keep[:, :, :-shift]], 2)
        shift *= 2
    states = built + keep * held[:, :, None]
    return (states * read[:, :, :, None]).sum(-1), states[:, :, -1]


def _inverse(xp: Any, lower: Array) -> Array:
    """(1 + lower)⁻¹ of strictly lower triangular matrices whose size is a power of two, by blocks of doubling size.

    The inverse of [[A, 0], [B, C]] is [[A⁻¹, 0], [−C⁻¹ B A⁻¹, C⁻¹]]: each round computes it for all pairs of blocks.
    """
    size = lower.shape[-1]
    index = xp.arange(size)
    found = xp.eye(size)
    block = 1
    while block < size:
        rows, columns = index[:, None] // block, index[None] // block
        below = (rows == columns + 1) & (columns % 2 == 0)
        found = found - found @ xp.where(below, lower, 0.0) @ found
        block *= 2
    return found


def _before(xp: Any, state: Array, past_lengths: Array) -> Array:
    return xp.where(past_lengths.reshape(-1, *[1] * (state.ndim - 1)) > 0, state, 0.0)


def _by_head(xp: Any, t: Array, heads: int) -> Array:
    """[B, Q, G, D] → [B, H, Q, D], each of the G repeated for H / G consecutive heads."""
    batch, length, given, size = t.shape
    if given != heads:
        shape = (batch, length, given, heads // given, size)
        t = xp.broadcast_to(t[:, :, :, None], shape).reshape(batch, length, heads, size)
    return t.swapaxes(1, 2)


def _padded(xp: Any, t: Array, axis: int, multiple: int) -> Array:
    missing = -t.shape[axis] % multiple
    if not missing:
        return t
    shape = [missing if i == axis else n for i, n in enumerate(t.shape)]
    return xp.concatenate([t, xp.zeros(shape, dtype=t.dtype)], axis)
