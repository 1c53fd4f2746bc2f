"""What follows a model's last layer, as described by a bundle's file POOLING, computed in numpy.

    pooling.json = {"format": 1, "task": "embed" | "score", "max_length": tokens, "lowercase": bool, "strip": bool,
                    "modules": [module, …], "prompts": {name: text}, "default_prompt": name | null,
                    "activation": name, "template": [before, between, after] | null, "instruction": text}
    module       = {"kind": "pooling", "modes": [mode, …], "include_prompt": bool}
                 | {"kind": "dense", "weight": name, "bias": name | null, "activation": name}
                 | {"kind": "normalize"}

"modules" are those after the transformer of a sentence-transformers checkpoint, in order. A "score" has none; it has an
activation and, for decoder models that judge, the text around a query and a document. Dense weights are named arrays in
the file WEIGHTS (npz, float32, [out, in]). Source of the rules: sentence-transformers 6.2.0, modules pooling.py
(`_forward_padded`), dense.py, normalize.py.

Shapes: hidden [B, T, H] float32. The first lengths[b] tokens of row b count; the others may hold any value, even NaN.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import erf
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmc.errors import ArtifactError

Array = NDArray[np.float32]
POOLING, WEIGHTS = "pooling.json", "pooling.npz"
FORMAT = 1
Task = Literal["embed", "score"]
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
_NORM_FLOOR = 1e-12
"""torch.nn.functional.normalize's eps."""
ACTIVATIONS = ("identity", "sigmoid", "tanh", "relu", "gelu", "softmax")


@dataclass(frozen=True)
class Pooling:
    """One vector from a text's tokens: its `modes`, concatenated. Prompt tokens count only with `include_prompt`."""

    modes: tuple[str, ...]
    include_prompt: bool = True


@dataclass(frozen=True)
class Dense:
    """activation(weight · x + bias). Fields name arrays."""

    weight: str
    bias: str | None
    activation: str


@dataclass(frozen=True)
class Normalize:
    """Scale to length 1."""


Module: TypeAlias = Pooling | Dense | Normalize


@dataclass(frozen=True)
class PoolingDescription:
    """A parsed pooling.json. `template`: the texts before a query, between it and a document, and after."""

    task: Task
    max_length: int
    modules: tuple[Module, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    lowercase: bool = False
    strip: bool = True
    activation: str = "identity"
    template: tuple[str, str, str] | None = None
    instruction: str = ""

    @property
    def pooling(self) -> Pooling | None:
        """The first module of an embedding, or None."""
        return next((m for m in self.modules if isinstance(m, Pooling)), None)

    def to_json(self) -> bytes:
        """The file's bytes; equal descriptions give equal bytes."""
        fields = {
            "format": FORMAT, "task": self.task, "max_length": self.max_length, "lowercase": self.lowercase,
            "strip": self.strip, "modules": [_written(m) for m in self.modules], "prompts": dict(self.prompts),
            "default_prompt": self.default_prompt, "activation": self.activation, "template": self.template,
            "instruction": self.instruction,
        }  # fmt: skip
        return json.dumps(fields, sort_keys=True, indent=1).encode()

    @classmethod
    def parse(cls, data: bytes, source: str) -> PoolingDescription:
        """Parse a bundle's description; raises ArtifactError naming `source` if it is invalid."""
        try:
            fields = json.loads(data)
            if fields["format"] != FORMAT:
                raise ValueError(f"format {fields['format']!r}, this llmc reads {FORMAT}")
            built = cls(
                fields["task"], int(fields["max_length"]), tuple(_read(m) for m in fields["modules"]),
                {str(name): str(text) for name, text in fields["prompts"].items()}, fields["default_prompt"],
                bool(fields["lowercase"]), bool(fields["strip"]), fields["activation"],
                None if fields["template"] is None else tuple(fields["template"]), str(fields["instruction"]),
            )  # fmt: skip
            built._check()
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ArtifactError(
                f"{source}: {POOLING} is not what llmc writes ({error}); compile the bundle again"
            ) from error
        return built

    def _check(self) -> None:
        if self.task not in ("embed", "score") or self.max_length < 1 or self.activation not in ACTIVATIONS:
            raise ValueError(f"task {self.task!r}, max_length {self.max_length}, activation {self.activation!r}")
        if self.default_prompt is not None and self.default_prompt not in self.prompts:
            raise ValueError(f"no prompt {self.default_prompt!r}")
        if self.template is not None and (
            len(self.template) != 3 or not all(isinstance(t, str) for t in self.template)
        ):
            raise ValueError("a template must have three texts")
        if (self.task == "embed") != isinstance(next(iter(self.modules), None), Pooling):
            raise ValueError("an embedding must begin with pooling, a score must have none")


def _written(module: Module) -> dict[str, Any]:
    match module:
        case Pooling(modes, include_prompt):
            return {"kind": "pooling", "modes": list(modes), "include_prompt": include_prompt}
        case Dense(weight, bias, activation):
            return {"kind": "dense", "weight": weight, "bias": bias, "activation": activation}
        case Normalize():
            return {"kind": "normalize"}


def _read(fields: Mapping[str, Any]) -> Module:
    kind = fields["kind"]
    if kind == "pooling":
        modes = tuple(fields["modes"])
        if not modes or set(modes) - set(MODES):
            raise ValueError(f"pooling modes {modes!r}")
        return Pooling(modes, bool(fields["include_prompt"]))
    if kind == "dense":
        if fields["activation"] not in ACTIVATIONS:
            raise ValueError(f"activation {fields['activation']!r}")
        return Dense(str(fields["weight"]), fields["bias"], fields["activation"])
    if kind == "normalize":
        return Normalize()
    raise ValueError(f"module {kind!r}")


def embed(
    description: PoolingDescription,
    weights: Mapping[str, Array],
    hidden: Array,
    lengths: NDArray[np.int64],
    prompt: int = 0,
) -> Array:
    """Apply every module to `hidden`; returns one vector per row, [B, D].

    `prompt` is the number of leading prompt tokens, which a pooling may exclude.
    """
    x = hidden
    for module in description.modules:
        match module:
            case Pooling():
                x = pooled(module, x, lengths, 0 if module.include_prompt else prompt)
            case Dense():
                x = x @ weights[module.weight].T
                if module.bias is not None:
                    x = x + weights[module.bias]
                x = activated(module.activation, x)
            case Normalize():
                x = normalised(x)
    return x


def pooled(module: Pooling, hidden: Array, lengths: NDArray[np.int64], skip: int = 0) -> Array:
    """Pool the tokens from `skip` to each row's length, one vector per mode: [B, H · modes].

    A row without remaining tokens gives zeros, except for "cls" and "lasttoken", which take its first and last token.
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
    """Σ_t weight[b, t] · hidden[b, t] over live tokens. Selects instead of multiplying by 0, because 0 · NaN is NaN."""
    out = np.empty((len(hidden), hidden.shape[2]), np.float32)
    given = weight.astype(np.float32)
    for row, length in enumerate(lengths):
        out[row] = given[row, :length] @ hidden[row, :length]
    return out


def normalised(x: Array) -> Array:
    """Scale rows to length 1; rows of zeros stay."""
    norm: Array = np.linalg.norm(x, axis=-1, keepdims=True)
    return np.asarray(x / np.maximum(norm, _NORM_FLOOR), np.float32)


def activated(name: str, x: Array) -> Array:
    """Apply one of ACTIVATIONS by name; softmax runs over the last dimension."""
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
