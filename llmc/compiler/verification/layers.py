"""Find the layer after which a compiled model first differs from its reference.

This runs only after a failed verification. The model runs twice with the checkpoint's weights in float32. First it runs
like the reference, each text alone. Then it runs as traced, with each of llmc's forms of attention, over ragged rows
with random padding and NaN in the unused cache: a step of all tokens but the last, then one of that. Hidden states of
live tokens are compared after every layer. A tracing error shows here on any device; without a difference, the fault is
behind the trace.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from llmc.compiler.architectures.shared.caches import cache_of
from llmc.compiler.frontend.attention import Dialect, attention_name
from llmc.compiler.frontend.real_model import layers_of, load_real_model
from llmc.compiler.frontend.trace import TracedStep

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.runtime.cache_shape import CacheShape

LONGEST = 256
"""Tokens of the longest text, at most."""
DIFFERENT = 1e-3
"""Relative to the largest value of a layer's hidden states; another order of summation changes 1e-6 of it."""
_NAN = float("nan")

Hidden = list[Tensor]
"""Hidden states after each layer, [tokens, H]."""


def first_difference(checkpoint: Checkpoint, longest: int) -> str:
    """Describe the first difference in a sentence for the error message; texts have up to `longest` tokens.

    Raises the errors of loading the model.
    """
    model = load_real_model(checkpoint)
    texts = _texts(min(longest, LONGEST), int(checkpoint.config["vocab_size"]))
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = [_alone(model, text) for text in texts]
        shape, largest = cache_of(checkpoint.config), 0.0
        for dialect in get_args(Dialect):
            errors = _errors(wanted, _traced(model, shape, dialect, texts))
            at = next((i for i, error in enumerate(errors) if not error <= DIFFERENT), None)
            if at is not None:
                return _said(model, at, errors, dialect)
            largest = max(largest, *errors)
    return (
        f"traced, all {len(wanted[0])} layers give the reference's hidden states over {len(texts[0])} tokens (largest "
        f"difference {largest:.1g} of their size): the fault is behind the trace, in the lowering for the device, its "
        "compiler or the number formats"
    )


def _said(model: nn.Module, at: int, errors: Sequence[float], dialect: Dialect) -> str:
    layer = layers_of(model)[at]
    before = f", after those before it by {max(errors[:at]):.1g}" if at else ""
    return (
        f"hidden states first differ from the reference's after layer {at} of 0 … {len(errors) - 1} "
        f"({type(layer).__name__}), by {errors[at]:.2g} of their size{before}: that layer is traced wrongly (dialect "
        f"{dialect}), so its architecture is not supported with this configuration"
    )


def _texts(longest: int, vocab_size: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    longest = max(2, longest)
    return [random.integers(0, vocab_size, length).tolist() for length in (longest, max(2, longest // 3), 2)]


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[Tensor]]:
    """Output of each layer, [B, Q, H], as the model runs."""
    seen: list[Tensor] = []

    def keep(_: nn.Module, __: Any, out: Any) -> None:
        seen.append(out if isinstance(out, Tensor) else out[0])

    handles = [layer.register_forward_hook(keep) for layer in layers_of(model)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _alone(model: nn.Module, text: list[int]) -> Hidden:
    with _watched(model) as seen:
        model(torch.tensor([text]), use_cache=False)
    return [hidden[0] for hidden in seen]


def _traced(model: Any, shape: CacheShape, dialect: Dialect, texts: list[list[int]]) -> list[Hidden]:
    """Hidden states of each text from the traced model, over ragged rows."""
    own = model.config._attn_implementation
    model.set_attn_implementation(attention_name(dialect))
    try:
        step, rows, query = TracedStep(model, dialect, shape), len(texts), len(texts[0]) - 1
        tokens = torch.randint(int(model.config.vocab_size), (rows, query), generator=torch.Generator().manual_seed(1))
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text) - 1] = torch.tensor(text[:-1])
        new, past = torch.tensor([len(text) - 1 for text in texts]), torch.zeros(rows, dtype=torch.long)
        cache = [torch.full(t.size(rows, query + 1), _NAN) for t in shape]
        with _watched(model) as first:
            _, *built = step(tokens, past, new, cache)
        for index, (tensor, given) in enumerate(zip(shape, built, strict=True)):
            cache[index] = given if tensor.kind == "state" or dialect == "fused" else _kept(given, new)
        with _watched(model) as last:
            step(torch.tensor([text[-1:] for text in texts]), new, torch.ones(rows, dtype=torch.long), cache)
    finally:
        model.set_attn_implementation(own)
    return [
        [torch.cat([a[row, : len(text) - 1], b[row, :1]]) for a, b in zip(first, last, strict=True)]
        for row, text in enumerate(texts)
    ]


def _kept(built: Tensor, lengths: Tensor) -> Tensor:
    """A cache of new keys or values, [B, H, Q, D], with NaN behind each row's live tokens."""
    live = torch.arange(built.shape[2])[None] < lengths[:, None]
    return built.masked_fill(~live[:, None, :, None], _NAN)


def _errors(wanted: list[Hidden], found: list[Hidden]) -> list[float]:
    """Largest difference of each layer, relative to the largest value; infinite where a value is NaN."""
    layers = range(len(wanted[0]))
    apart = [max(float((f[i] - w[i]).abs().max()) for w, f in zip(wanted, found, strict=True)) for i in layers]
    sizes = [max(float(w[i].abs().max()) for w in wanted) for i in layers]
    return [a / max(s, 1e-30) if np.isfinite(a) else float("inf") for a, s in zip(apart, sizes, strict=True)]
