"""LoRA adapters as PEFT saves them, and checkpoints with adapters that are merged or that requests choose.

A folder has adapter_config.json and adapter_model.safetensors.

A module's weight W [out, in] becomes W + s · B A, with lora_A [r, in] and lora_B [out, r]; an embedding [tokens, H]
becomes W + s · (B A)ᵀ. s = lora_alpha / r, or lora_alpha / √r with `use_rslora`; `alpha_pattern` overrides lora_alpha
for some modules. With `use_dora`, each row of the sum is scaled to its stored magnitude. Modules with weights [in, out]
(GPT-2's) take the transposed product. Other tensors, from `modules_to_save` and biases, replace the model's. Source:
PEFT 0.21, tuners/lora/layer.py (get_delta_weight, merge), dora.py and utils/save_and_load.py. The arithmetic is
float32.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod, sqrt
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from llmc.compiler.architectures.shared.names import LM_HEADS
from llmc.compiler.checkpoint.adapter_layout import (
    HIGH,
    LOW,
    SELECTABLE,
    SHARING,
    AdapterGroup,
    AdapterLayout,
    beside,
    pattern_of,
)
from llmc.compiler.checkpoint.base import (
    ADAPTER_CONFIG,
    AdapterFacts,
    Checkpoint,
    FloatArray,
    WrappedCheckpoint,
    folder_name,
    require_finite,
)
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
        return str(self.config.get("base_model_name_or_path") or "")

    @cached_property
    def changed(self) -> dict[str, str]:
        """Tensors of the model to which low-rank products are added → their modules."""
        weights = {f"{module}.weight": module for module in self._parts}
        biases = {f"{module}.bias": module for module, parts in self._parts.items() if "bias" in parts}
        return weights | biases

    @property
    def modules(self) -> Mapping[str, object]:
        return self._parts

    def rank(self, module: str) -> int:
        return _pair({part: self.file.tensors[stored] for part, stored in self._parts[module].items()})[0].shape[0]

    def factors(self, module: str) -> tuple[FloatArray, FloatArray]:
        """A [r, in] and B [out, r] of a module; B includes the scale."""
        low, high = _pair({part: self.file.tensor(stored) for part, stored in self._parts[module].items()})
        return low, high * np.float32(self._scale(module, low.shape[0]))

    def require_selectable(self) -> None:
        """Raise CheckpointError unless the adapter has low-rank products of linear modules only."""
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
        """Return tensor `name`, one of `changed`, with the adapter's change."""
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


def _numbered(kind: str, adapters: Sequence[PeftAdapter]) -> dict[str, Path]:
    """The adapters' files by roles with the adapter's number as prefix."""
    names = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    return {f"{kind}.{n}/{name}": one.path / name for n, one in enumerate(adapters) for name in names}


class LoraCheckpoint(WrappedCheckpoint):
    """`base` with `adapters` merged in order. Tokenizer, template and generation defaults are the base's. Raises
    CheckpointError for an adapter of another base model.

    If lm_head and embedding are tied and an adapter changes one of them, the other keeps its values. They become two
    tensors, like in PEFT before it merges.
    """

    def __init__(self, base: Checkpoint, adapters: Sequence[PeftAdapter]) -> None:
        super().__init__(base, "+".join(adapter.name for adapter in adapters), f"{base.format}+lora")
        self.adapters = tuple(adapters)
        self._stored = {name: name for name in base.tensor_names()}
        touched = {name for adapter in adapters for name in (*adapter.changed, *adapter.replaced)}
        for head, embeddings in LM_HEADS.items():
            embedding = next((e for e in embeddings if e in self._stored), None)
            if head not in self._stored and embedding and not touched.isdisjoint({head, embedding}):
                self._stored[head] = embedding
        self._untied = len(self._stored) > len(base.tensor_names())
        for adapter in adapters:
            self._check(adapter)

    def _check(self, adapter: PeftAdapter) -> None:
        for name in adapter.changed:
            if name not in self._stored:
                of = f"; it was trained for {adapter.base}" if adapter.base else ""
                raise CheckpointError(
                    f"{adapter.path}: it changes {name}, but {self.inner.path} has no such tensor: the adapter is of "
                    f"another base model, or changes modules that cannot be merged{of}"
                )
            adapter.require_fit(name, self.shape(name))
        for name, stored in adapter.replaced.items():
            shape = adapter.file.tensors[stored].shape
            has = f"one of {list(self.shape(name))}" if name in self._stored else "no such tensor"
            if name not in self._stored or shape != self.shape(name):
                raise CheckpointError(
                    f"{adapter.path}: it replaces {name} by {list(shape)}, but {self.inner.path} has {has}: the "
                    "adapter is of another base model, or of one whose vocabulary was changed; merge it with PEFT"
                )

    @property
    def config(self) -> dict[str, Any]:
        return self.inner.config | ({"tie_word_embeddings": False} if self._untied else {})

    def as_stored(self, name: str) -> str | None:
        """None for a tensor that an adapter changes; for an untied lm_head, the embedding."""
        if any(name in adapter.changed or name in adapter.replaced for adapter in self.adapters):
            return None
        return self._stored.get(name, name)

    def roles(self) -> dict[str, Path]:
        return self.inner.roles() | _numbered("lora", self.adapters)

    def tensor_names(self) -> list[str]:
        return sorted(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.inner.shape(self._stored.get(name, name))

    def tensor(self, name: str) -> FloatArray:
        replaced = next((a for a in reversed(self.adapters) if name in a.replaced), None)
        if replaced is None:
            values = self.inner.tensor(self._stored.get(name, name))
        else:
            values = replaced.file.tensor(replaced.replaced[name])
        for adapter in self.adapters:
            if name in adapter.changed:
                values = require_finite(adapter.apply(name, values), name, adapter.path)
        return values

    def forget(self) -> None:
        self.inner.forget()
        for adapter in self.adapters:
            adapter.file.forget()

    def unkept(self, name: str) -> str | None:
        reason = self.inner.unkept(stored := self._stored.get(name, name))
        if self.as_stored(name) is None and (reason is not None or self.inner.stored_form(stored) is not None):
            return "changed by an adapter"
        return reason


_NAME = re.compile(r"[^\s=:]{1,200}")


class SelectableCheckpoint(WrappedCheckpoint):
    """`base` with `adapters` by name, of which each request chooses one. Name, tokenizer, template and generation
    defaults are the base's.

    It adds A and B of each module that an adapter changes, stacked as in adapter_layout.py. B includes the adapter's
    scale. Each column of B is then normalised to a largest value of 1, and the matching row of A takes the factor. So
    values of one adapter do not affect the rounding of another that shares a block of quantized weights.

    Raises CheckpointError for an invalid name, for an adapter of another base model, and for an adapter that changes
    more than linear modules by low-rank products.
    """

    def __init__(self, base: Checkpoint, adapters: Mapping[str, PeftAdapter]) -> None:
        super().__init__(base, base.name, f"{base.format}+adapters")
        for name, adapter in adapters.items():
            if not _NAME.fullmatch(name) or name == base.name:
                why = "the base model is called that" if name == base.name else "give it one without spaces, = and :"
                raise CheckpointError(f"{adapter.path}: {name!r} cannot be the name of an adapter: {why}")
            adapter.require_selectable()
        self._peft = tuple(adapters.values())
        self._merged = [LoraCheckpoint(base, [adapter]) for adapter in self._peft]
        self._columns: dict[str, list[tuple[int, str, int, int]]] = {}
        """By member, for its whole group: adapter, member, and the first and last of its columns."""
        self.layout = AdapterLayout(tuple(self._groups()))
        self._added = {
            module + end: module
            for name in base.tensor_names()
            if self.layout.group(module := name.removesuffix(".weight")) and name.endswith(".weight")
            for end in (LOW, HIGH)
        }
        self.choices = tuple(
            AdapterFacts(name, adapter.name, max(map(adapter.rank, adapter.modules)), _leaves(adapter.modules))
            for name, adapter in adapters.items()
        )

    def _groups(self) -> Iterator[AdapterGroup]:
        ranks: list[dict[str, int]] = [{} for _ in self._peft]
        for found, adapter in zip(ranks, self._peft, strict=True):
            for module in adapter.modules:
                pattern = pattern_of(module)
                found[pattern] = max(found.get(pattern, 0), adapter.rank(module))
        widths: dict[str, set[int]] = {}
        for name in self.inner.tensor_names():
            if len(shape := self.inner.shape(name)) == 2:
                widths.setdefault(pattern_of(name.removesuffix(".weight")), set()).add(shape[1])
        left = sorted({pattern for found in ranks for pattern in found})
        while left:
            members = [member for member in _sharing(left[0]) if widths.get(member) == widths[left[0]]]
            left = [pattern for pattern in left if pattern not in members]
            at, columns, each = 0, [], []
            for number, found in enumerate(ranks):
                begin = at
                for member in members:
                    columns.append((number, member, at, at + found.get(member, 0)))
                    at += found.get(member, 0)
                each.append(at - begin)
            self._columns |= dict.fromkeys(members, columns)
            yield AdapterGroup(tuple(members), tuple(each))

    def of_adapter(self, number: int) -> Checkpoint:
        return self._merged[number - 1] if number else self.inner

    @property
    def config(self) -> dict[str, Any]:
        return self.inner.config | {SELECTABLE: self.layout.to_json()}

    def roles(self) -> dict[str, Path]:
        return self.inner.roles() | _numbered("adapter", self._peft)

    def tensor_names(self) -> list[str]:
        return sorted([*self.inner.tensor_names(), *self._added])

    def shape(self, name: str) -> tuple[int, ...]:
        """[R, in] for A, [out, R] for B, the base's shape for other tensors."""
        if name not in self._added:
            return self.inner.shape(name)
        module = self._added[name]
        rows, width = self.inner.shape(f"{module}.weight")
        group = self.layout.group(module)
        assert group is not None
        return (group.columns, width) if name.endswith(LOW) else (rows, group.columns)

    def tensor(self, name: str) -> FloatArray:
        if name not in self._added:
            return self.inner.tensor(name)
        built, module = np.zeros(self.shape(name), np.float32), self._added[name]
        for number, member, first, last in self._columns[pattern_of(module)]:
            adapter, there = self._peft[number], beside(module, member)
            if first == last or there not in adapter.modules or (name.endswith(HIGH) and there != module):
                continue
            low, high = adapter.factors(there)
            largest = np.abs(high).max(0)
            largest[largest == 0] = 1
            end = first + len(low)
            if name.endswith(LOW):
                built[first:end] = low * largest[:, None]
            else:
                built[:, first:end] = high / largest
        return require_finite(built, name, self.path)

    def as_stored(self, name: str) -> str | None:
        return None if name in self._added else name

    def forget(self) -> None:
        self.inner.forget()
        for adapter in self._peft:
            adapter.file.forget()


def _sharing(pattern: str) -> list[str]:
    """The modules that read the same input as `pattern`, itself included, as far as names tell."""
    owner, dot, leaf = pattern.rpartition(".")
    return [owner + dot + name for name in next((names for names in SHARING if leaf in names), (leaf,))]


def _leaves(modules: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(sorted({module.rpartition(".")[2] for module in modules}))
