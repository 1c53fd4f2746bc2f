"""Layers of a model that only their weights tell apart are of one kind, and a few of each are traced.

A layer's kind is read off the module: classes and names of all that is in it, every attribute but its index, names,
shapes and dtypes of its parameters, and its entry in each list of the configuration that has one for every layer. What
cannot be compared so (buffers, tensors in attributes, shared parameters, objects without a value) has no kind, and the
model is traced whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import BuiltinFunctionType, FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn

_TRACED = 3
"""Layers of a kind that are traced: the first may make what all read, and the next two are compared."""

_INDEX = ("layer_idx", "layer_id")
_VALUES = (type(None), bool, int, float, str, torch.dtype, torch.device, type, FunctionType, BuiltinFunctionType)
_PARTS = ("_parameters", "_modules", "_buffers")


class NotRepeatableError(Exception):
    """The program cannot be made from a few layers; the message says why. The model is to be traced whole."""


@torch.library.custom_op("llmc::layer", mutates_args=())
def layer_mark(hidden: Tensor) -> Tensor:
    """The hidden states as they are: marks where a layer begins, and where the last one ends."""
    return hidden.clone()


@layer_mark.register_fake
def _(hidden: Tensor) -> Tensor:
    return hidden.clone()


@dataclass(frozen=True)
class LayerPlan:
    """Which layers of a model are traced, and which of these each layer is like."""

    kinds: tuple[int, ...]
    """Of each layer of the model; equal numbers are of one kind."""
    path: str
    """Where the model has the list of its layers, such as "model.layers"."""

    @classmethod
    def of(cls, model: nn.Module) -> LayerPlan | None:
        """None where the model is to be traced whole: few layers of each kind, or layers without a kind."""
        try:
            plan = cls(layer_kinds(model), layers_of(model))
        except NotRepeatableError:
            return None
        return plan if len(plan.traced) < len(plan.kinds) else None

    @cached_property
    def traced(self) -> list[int]:
        """The layers that are traced, by their index in the model, rising."""
        return [i for i, kind in enumerate(self.kinds) if self.kinds[:i].count(kind) < _TRACED]

    @cached_property
    def like(self) -> list[int]:
        """Of each layer of the model, the place among the traced ones of the layer whose operators it has."""
        traced = self.traced
        places = {self.kinds[i]: place for place, i in enumerate(traced)}
        return [traced.index(i) if i in traced else places[kind] for i, kind in enumerate(self.kinds)]

    @cached_property
    def steady(self) -> list[tuple[int, int]]:
        """Places of the last two traced layers of each kind that is repeated; these have to be the same."""
        places: dict[int, list[int]] = {}
        for place, i in enumerate(self.traced):
            places.setdefault(self.kinds[i], []).append(place)
        return [(p[-2], p[-1]) for kind, p in places.items() if self.kinds.count(kind) > _TRACED]

    def apply(self, model: nn.Module) -> None:
        """Leave only the layers that are traced, numbered anew, and mark where each begins and the last one ends."""
        owner, _, leaf = self.path.rpartition(".")
        config: Any = model.config
        layers: Any = model.get_submodule(self.path)
        kept = nn.ModuleList(layers[i] for i in self.traced)
        for place, layer in enumerate(kept):
            for module in layer.modules():
                for name in _INDEX:
                    if hasattr(module, name):
                        setattr(module, name, place)
            layer.register_forward_pre_hook(_mark_input)
        kept[-1].register_forward_hook(_mark_output)
        for name, values in _lists(config, len(self.kinds)).items():
            setattr(config, name, [values[i] for i in self.traced])
        config.num_hidden_layers = len(kept)
        setattr(model.get_submodule(owner), leaf, kept)


def _mark_input(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    return (torch.ops.llmc.layer(args[0]), *args[1:]) if args and isinstance(args[0], Tensor) else None


def _mark_output(_: nn.Module, __: Any, hidden: Any) -> Any:
    if isinstance(hidden, tuple):  # with attention weights or a cache beside them
        return (torch.ops.llmc.layer(hidden[0]), *hidden[1:])
    return torch.ops.llmc.layer(hidden) if isinstance(hidden, Tensor) else None


def layers_of(model: nn.Module) -> str:
    """Where a model has its decoder layers: the only list of as many modules as it has layers, outside other lists.

    Raises NotRepeatableError.
    """
    count: Any = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    found = [name for name in outermost if len(cast(nn.ModuleList, model.get_submodule(name))) == count]
    if len(found) != 1:
        raise NotRepeatableError("the decoder layers are not one list")
    return str(found[0])


def layer_kinds(model: nn.Module) -> tuple[int, ...]:
    """The kind of each decoder layer, as the index of the first that is like it. Raises NotRepeatableError."""
    layers = cast(nn.ModuleList, model.get_submodule(layers_of(model)))
    config: Any = model.config
    owners = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    if any(owners[id(p)] > 1 for p in layers.parameters()):
        raise NotRepeatableError("a layer shares a parameter")
    lists = _lists(config, len(layers))
    described = [
        (_module(layer, config, i), {name: _value(values[i], config) for name, values in lists.items()})
        for i, layer in enumerate(layers)
    ]
    return tuple(described.index(layer) for layer in described)


def _lists(config: Any, layers: int) -> dict[str, Any]:
    """The configuration's lists that have an entry for each layer."""
    return {name: v for name, v in vars(config).items() if isinstance(v, list | tuple) and len(v) == layers}


def _module(module: nn.Module, config: Any, layer: int) -> Any:
    """All of a module but its layer's index and its weights' values."""
    if any(True for _ in module.buffers(recurse=False)):
        raise NotRepeatableError(f"{type(module).__name__} has buffers")
    return (
        type(module),
        [(n, p if p is None else (tuple(p.shape), p.dtype)) for n, p in module._parameters.items()],
        [(n, m if m is None else _module(m, config, layer)) for n, m in module._modules.items()],
        {
            name: _value(v, config)
            for name, v in vars(module).items()
            if name not in _PARTS and not (name in _INDEX and v == layer)
        },
    )


def _value(value: Any, config: Any) -> Any:
    """Something that equals what it is made of in another layer just where `value` does."""
    if value is config or isinstance(value, _VALUES):
        return type(value), value if value is not config else None
    if isinstance(value, Mapping):
        return type(value), [(_value(k, config), _value(v, config)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [_value(v, config) for v in value]
    if isinstance(value, set | frozenset) and all(isinstance(v, str) for v in value):
        return type(value), value
    raise NotRepeatableError(f"an attribute is a {type(value).__name__}")
