"""Hidden states of a batch to vectors, as sentence-transformers' modules compute them, in numpy.

Shapes: hidden [B, T, H] float32, of which row b's first lengths[b] tokens count; the others may hold anything that is
finite or not. Source of the rules: sentence-transformers 6.2.0, modules/pooling.py (`_forward_padded`).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import erf

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.pooling.modules import Dense, Description, Normalize, Pool

Array = NDArray[np.float32]
_NORM_FLOOR = 1e-12
"""torch.nn.functional.normalize's eps."""


def embed(
    description: Description, weights: Mapping[str, Array], hidden: Array, lengths: NDArray[np.int64], prompt: int = 0
) -> Array:
    """One vector a row, [B, D]: `hidden` through every module. `prompt`: tokens of the prompt that all rows begin
    with, which a pooling may leave out."""
    x = hidden
    for module in description.modules:
        match module:
            case Pool():
                x = pooled(module, x, lengths, 0 if module.include_prompt else prompt)
            case Dense():
                x = x @ weights[module.weight].T
                if module.bias is not None:
                    x = x + weights[module.bias]
                x = activated(module.activation, x)
            case Normalize():
                x = normalised(x)
    return x


def pooled(module: Pool, hidden: Array, lengths: NDArray[np.int64], skip: int = 0) -> Array:
    """[B, H · modes]: the tokens from `skip` to each row's length as one vector a mode.

    A row with no token left gives zeros, but for "cls" and "lasttoken", which take its first and last token.
    """
    positions = np.arange(hidden.shape[1])
    live = (positions >= skip) & (positions < lengths[:, None])
    rows = np.arange(len(hidden))
    found = []
    for mode in module.modes:
        if mode == "cls":
            found.append(hidden[rows, np.where(lengths > skip, skip, 0)])
        elif mode == "lasttoken":
            found.append(hidden[rows, lengths - 1])
        elif mode == "max":
            found.append(np.where(live[..., None], hidden, -np.inf).max(1))
        else:
            weight = live * (positions + 1.0 if mode == "weightedmean" else 1.0)
            total = np.maximum(weight.sum(1, keepdims=True), 1e-9)
            found.append(
                _weighted(hidden, lengths, weight) / (np.sqrt(total) if mode.startswith("mean_sqrt") else total)
            )
    return np.concatenate(found, -1, dtype=np.float32)


def _weighted(hidden: Array, lengths: NDArray[np.int64], weight: NDArray[np.float64]) -> Array:
    """Σ_t weight[b, t] · hidden[b, t] over live tokens: NaN in padding does not count, as 0 · NaN would."""
    out = np.empty((len(hidden), hidden.shape[2]), np.float32)
    given = weight.astype(np.float32)
    for row, length in enumerate(lengths):
        out[row] = given[row, :length] @ hidden[row, :length]
    return out


def normalised(x: Array) -> Array:
    """Rows of length 1; rows of zeros stay."""
    norm: Array = np.linalg.norm(x, axis=-1, keepdims=True)
    return np.asarray(x / np.maximum(norm, _NORM_FLOOR), np.float32)


def activated(name: str, x: Array) -> Array:
    """One of modules.ACTIVATIONS, by name; softmax over the last dimension."""
    match name:
        case "sigmoid":
            return np.asarray(1 / (1 + np.exp(-x.astype(np.float64))), np.float32)
        case "tanh":
            return np.tanh(x)
        case "relu":
            return np.asarray(np.maximum(x, 0), np.float32)
        case "gelu":
            return np.asarray(x * 0.5 * (1 + np.vectorize(erf, otypes=[float])(x / np.sqrt(2))), np.float32)
        case "softmax":
            shares = np.exp(x - x.max(-1, keepdims=True))
            return np.asarray(shares / shares.sum(-1, keepdims=True), np.float32)
    return x
