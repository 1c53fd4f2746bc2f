"""LoRA adapters as PEFT saves them: a folder with adapter_config.json and adapter_model.safetensors.

A module's weight W [out, in] becomes W + s · B A, with lora_A [r, in] and lora_B [out, r]; an embedding [tokens, H]
becomes W + s · (B A)ᵀ. s = lora_alpha / r, or lora_alpha / √r with `use_rslora`; `alpha_pattern` overrides lora_alpha
for some modules. With `use_dora`, each row of the sum is scaled to its stored magnitude. Modules with weights [in, out]
(GPT-2's) take the transposed product. Other tensors, from `modules_to_save` and biases, replace the model's. Source:
PEFT 0.21, tuners/lora/layer.py (get_delta_weight, merge), dora.py and utils/save_and_load.py. The arithmetic is
float32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from math import prod, sqrt
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from llmc.compiler.checkpoint.base import ADAPTER_CONFIG, FloatArray, folder_name
from llmc.compiler.checkpoint.huggingface import read_json
from llmc.compiler.checkpoint.safetensors_file import SafetensorsFile
from llmc.errors import CheckpointError
from llmc.paths import is_file

T = TypeVar("T")

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_PREFIX = "base_model.model."
_PARTS = {
    ".lora_A.weight": "A", ".lora_B.weight": "B", ".lora_B.bias": "bias", ".lora_embedding_A": "embedding_A",
    ".lora_embedding_B": "embedding_B", ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
}  # fmt: skip
_READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "fan_in_fan_out", "alpha_pattern", "rank_pattern",
    "init_lora_weights", "base_model_name_or_path", "lora_bias",
}  # fmt: skip
_NO_MATTER = {
    "auto_mapping", "bias", "corda_config", "eva_config", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core", "modules_to_save", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
}  # fmt: skip
"""Keys that the tensors imply, or that only training reads."""
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base model's weights unchanged."""


class PeftAdapter:
    """An opened adapter. Opening reads its configuration and its weights' header; raises CheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = folder_name(path)
        self.config = read_json(path / ADAPTER_CONFIG)
        self._check_config()
        if not is_file(path / ADAPTER_WEIGHTS):
            raise CheckpointError(
                f"{path}: {_PICKLED} holds pickled weights, which llmc does not load: convert them with "
                "`PeftModel.from_pretrained(…).save_pretrained(…)` (safetensors)"
                if is_file(path / _PICKLED)
                else f"{path}: no weights (looked for {ADAPTER_WEIGHTS}); fetch the adapter again"
            )
        self.file = SafetensorsFile(path / ADAPTER_WEIGHTS)
        self.replaced: dict[str, str] = {}
        """Tensors of the model that are replaced → their names in the file."""
        self._parts: dict[str, dict[str, str]] = {}
        self._sort()

    def _check_config(self) -> None:
        config, what = self.config, f"{self.path / ADAPTER_CONFIG}"
        if config.get("peft_type") != "LORA":
            raise CheckpointError(
                f"{what}: peft_type is {config.get('peft_type')!r}, but only LORA can be read; merge it with PEFT "
                "(`merge_and_unload`) and compile the result"
            )
        start = config.get("init_lora_weights")
        if start not in _PLAIN_STARTS:
            raise CheckpointError(
                f"{what}: init_lora_weights is {start!r}, which also changed the base model; save it as a plain "
                "adapter with PEFT (`path_initial_model_for_weight_conversion`), or merge it there"
            )
        unknown = sorted(name for name, value in config.items() if value and name not in _READ | _NO_MATTER)
        if unknown:
            raise CheckpointError(
                f"{what}: {', '.join(unknown)} is not supported, but changes the result; merge the adapter with "
                "PEFT (`merge_and_unload`) and compile the result"
            )

    def _sort(self) -> None:
        for stored in self.file.tensors:
            name = stored.removeprefix(_PREFIX).replace(".base_layer.", ".").replace(".modules_to_save.", ".")
            end = next((end for end in _PARTS if name.endswith(end)), None)
            if end is None:
                self.replaced[name] = stored
            else:
                self._parts.setdefault(name.removesuffix(end), {})[_PARTS[end]] = stored
        for module, parts in self._parts.items():
            if not ({"A", "B"} <= parts.keys() or {"embedding_A", "embedding_B"} <= parts.keys()):
                raise CheckpointError(
                    f"{self.path}: {module} has only {', '.join(sorted(parts.values()))}, but LoRA needs two matrices: "
                    "fetch the adapter again"
                )

    @property
    def base(self) -> str:
        """Name of the base model in the adapter's configuration; "" if absent."""
        return str(self.config.get("base_model_name_or_path") or "")

    @cached_property
    def changed(self) -> dict[str, str]:
        """Tensors of the model to which low-rank products are added → their modules."""
        weights = {f"{module}.weight": module for module in self._parts}
        biases = {f"{module}.bias": module for module, parts in self._parts.items() if "bias" in parts}
        return weights | biases

    @property
    def modules(self) -> Mapping[str, object]:
        """Modules with low-rank products, by name."""
        return self._parts

    def rank(self, module: str) -> int:
        """Rank of one of the `modules`."""
        return _pair({part: self.file.tensors[stored] for part, stored in self._parts[module].items()})[0].shape[0]

    def factors(self, module: str) -> tuple[FloatArray, FloatArray]:
        """A [r, in] and B [out, r] of a module; B includes the scale."""
        low, high = _pair({part: self.file.tensor(stored) for part, stored in self._parts[module].items()})
        return low, high * np.float32(self._scale(module, low.shape[0]))

    def require_selectable(self) -> None:
        """Raise CheckpointError unless the adapter has low-rank products of linear modules only, as requests can
        choose."""
        more = [
            *(("magnitudes (use_dora)",) if self.config.get("use_dora") else ()),
            *(f"another {name}" for name in self.replaced),
            *(f"a bias of {module}" for module, parts in self._parts.items() if "bias" in parts),
            *(f"an embedding, {module}" for module, parts in self._parts.items() if "embedding_A" in parts),
            *(("transposed weights (fan_in_fan_out)",) if self.config.get("fan_in_fan_out") else ()),
        ]
        if more or not self._parts:
            raise CheckpointError(
                f"{self.path}: it has {more[0] if more else 'no product'}, which no request can choose: "
                "selectable adapters change linear modules by low-rank products only; merge it "
                f"(--lora {self.path})"
            )

    def files(self) -> dict[str, Path]:
        """The adapter's files by name."""
        return {name: self.path / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}

    def require_fit(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise CheckpointError unless the adapter's change of tensor `name`, one of `changed`, fits `shape`."""
        module = self.changed[name]
        shapes = {part: self.file.tensors[stored].shape for part, stored in self._parts[module].items()}
        low, high = _pair(shapes)
        if len(low) != 2 or len(high) != 2 or low[0] != high[1] or not low[0]:
            raise self._misfit(name, shape, f"matrices {list(low)} and {list(high)}")
        change = shapes["bias"] if name.endswith(".bias") else (high[0], low[1])
        if shape not in (change, change[::-1]):
            raise self._misfit(name, shape, f"a change of {list(change)}")
        if self.config.get("use_dora") and prod(shapes.get("magnitude", ())) != high[0]:
            raise self._misfit(name, shape, "no magnitude per row, which use_dora requires")
        self._scale(module, low[0])

    def apply(self, name: str, weight: FloatArray) -> FloatArray:
        """Return tensor `name`, one of `changed`, with the adapter's change. Raises CheckpointError for NaN or
        infinity."""
        module = self.changed[name]
        parts = {part: self.file.tensor(stored) for part, stored in self._parts[module].items()}
        low, high = _pair(parts)
        scale = np.float32(self._scale(module, low.shape[0]))
        if name.endswith(".bias"):
            built: FloatArray = weight + scale * parts["bias"]
            return built
        matmul = scale * (high @ low)
        transposed = "embedding_A" in parts or self._is_transposed(weight.shape, matmul.shape)
        built = weight + (matmul.T if transposed else matmul)
        if self.config.get("use_dora"):
            rows = built.T if transposed else built
            rows *= (parts["magnitude"].ravel() / np.linalg.norm(rows, axis=1))[:, None]
        return built

    def _is_transposed(self, weight: tuple[int, ...], matmul: tuple[int, ...]) -> bool:
        """A square weight is decided by the configuration, any other by its shape."""
        return bool(self.config.get("fan_in_fan_out")) if matmul[0] == matmul[1] else matmul != weight

    def _scale(self, module: str, rank: int) -> float:
        """Source: PEFT's update_layer and get_pattern_key. Accepts names only: patterns from an untrusted file are not
        run."""
        patterns = self.config.get("alpha_pattern") or {}
        if not isinstance(patterns, Mapping) or not all(re.fullmatch(r"[\w.]+", key) for key in patterns):
            raise CheckpointError(
                f"{self.path / ADAPTER_CONFIG}: alpha_pattern is {patterns!r:.80}, but only module names can be read, "
                "in full or from a dot on; write out each name"
            )
        found = next((key for key in patterns if f".{module}".endswith(f".{key}")), None)
        alpha: Any = self.config.get("lora_alpha") if found is None else patterns[found]
        if type(alpha) not in (int, float) or not np.isfinite(alpha):
            raise CheckpointError(f"{self.path / ADAPTER_CONFIG}: lora_alpha is {alpha!r}, not a number")
        return float(alpha) / (sqrt(rank) if self.config.get("use_rslora") else rank)

    def _misfit(self, name: str, shape: tuple[int, ...], has: str) -> CheckpointError:
        of = f"; it was trained for {self.base}" if self.base else ""
        return CheckpointError(
            f"{self.path}: for {name}, {list(shape)} in the model, it has {has}: the adapter is of another base model, "
            f"or damaged{of}"
        )


def _pair(parts: Mapping[str, T]) -> tuple[T, T]:
    """The factors A [r, in] and B [out, r]."""
    kind = "embedding_" if "embedding_A" in parts else ""
    return parts[f"{kind}A"], parts[f"{kind}B"]
