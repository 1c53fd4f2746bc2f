"""compressed-tensors' quantization_config: which scheme a module's weight is stored by.

    config_groups  {name: {"targets": [..], "weights": {..}, "format": str?, "input_activations": {..}?}}
    ignore         [..]     modules that are not quantised
    format         str      of groups that state none

A target is the name of a module, "re:" and a pattern that its name begins with, or a class ("Linear"); names come
before patterns, and these before classes. Source: compressed-tensors 0.20, quantization/quant_config.py and
utils/match.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llmc.compiler.architectures.shared.names import HEADS, OUTER
from llmc.compiler.checkpoint.quantised.base import StoredTensors

_PATTERN = "re:"
_EMBEDDING = "Embedding"
_NONE: tuple[Any, ...] = (None, {}, [], False)


@dataclass(frozen=True)
class Scheme:
    """How the weights of some modules are stored: `weights` as they are stated (num_bits, type, strategy, …)."""

    layout: str
    weights: Mapping[str, Any]
    activations: bool
    """Whether activations are quantised as well, which changes no weight."""

    @property
    def strategy(self) -> str:
        """tensor, channel, group, tensor_group or block; by the group size where it is not stated."""
        stated = self.weights.get("strategy")
        if stated is None:
            group = self.weights.get("group_size")
            return "tensor" if group is None else "channel" if group == -1 else "group"
        return str(stated)


class Schemes:
    """The schemes of a folder by module. Raises CheckpointError for what is stated in no form that is known."""

    def __init__(self, stated: Mapping[str, Any], stored: StoredTensors) -> None:
        self._stored = stored
        groups, ignored = stated.get("config_groups"), stated.get("ignore") or []
        if not isinstance(groups, Mapping) or not groups or not _texts(ignored):
            raise stored.error("quantization_config: compressed-tensors needs config_groups, and ignore is a list")
        for name in ("transform_config", "sparsity_config"):
            self._require_none(name, stated.get(name))
        self._ignored: list[str] = ignored
        self._require_patterns(ignored)
        self._by_target: dict[str, Scheme] = {}
        for name, group in groups.items():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            targets: Any = group.get("targets") if isinstance(group, Mapping) else None
            if not isinstance(weights, Mapping) or not _texts(targets):
                raise stored.error(f"quantization_config: group {name!r:.60} has no weights or targets: fetch it again")
            self._require_patterns(targets)
            layout = str(group.get("format") or stated.get("format"))
            made = Scheme(layout, weights, bool(group.get("input_activations") or group.get("output_activations")))
            self._by_target |= dict.fromkeys(targets, made)
        self.activations = any(scheme.activations for scheme in self._by_target.values())
        self.activations |= bool(stated.get("kv_cache_scheme"))

    def _require_none(self, name: str, value: Any) -> None:
        if isinstance(value, Mapping) and value.get("format") == "dense":
            return
        if value not in _NONE:
            raise self._stored.error(
                f"quantization_config: {name} is {value!r:.60}, which is not read: the model would be another one"
            )

    def _require_patterns(self, targets: list[str]) -> None:
        for target in targets:
            try:
                re.compile(target.removeprefix(_PATTERN))
            except re.error as error:
                if target.startswith(_PATTERN):
                    raise self._stored.error(
                        f"quantization_config: target {target!r:.60}: {error}; fetch it again"
                    ) from error

    def of(self, module: str) -> Scheme:
        """The scheme of a module whose weight is stored in codes. Raises CheckpointError where none is for it."""
        if _first(module, self._ignored) is not None:
            raise self._stored.error(f"{module} is stored in codes, and quantization_config says to ignore it")
        target = _first(module, self._by_target)
        if target is None:
            wanted = _EMBEDDING if f"{module}.weight" in OUTER - HEADS.keys() else "Linear"
            target = wanted if wanted in self._by_target else None
        if target is None:
            raise self._stored.error(f"{module} is stored in codes, and no group of quantization_config is for it")
        return self._by_target[target]


def _first(module: str, targets: Iterable[str]) -> str | None:
    """The target that is or matches a module's name."""
    named = [t for t in targets if t == module]
    matching = (t for t in sorted(targets) if t.startswith(_PATTERN) and re.match(t.removeprefix(_PATTERN), module))
    return named[0] if named else next(matching, None)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
