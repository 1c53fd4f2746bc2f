"""The program of a whole model from the trace of a few of its layers.

Marks cut the traced graph into what comes before the layers, the layers, and what comes after. A layer may read

  - the hidden states of the previous layer, its own weights and its own cache;
  - inputs that belong to no layer, and values computed before all layers;
  - a size that an earlier layer computed.

A layer that reads anything else cannot be repeated. The last two traced layers of a kind must be identical except for
their weights and cache. Every other layer of the kind is then a copy of the last one, in the model's order. The result
has the inputs, outputs and operators of a whole trace. Operator names may differ, and guards on sizes appear once for
each traced layer instead of each layer.

Layers that differ only in their weights are of one kind, and a few of each kind are traced.

A layer's kind covers classes, names and attributes in its module, except its index. It also covers names, shapes and
dtypes of its parameters, and its entries in the configuration's lists with one entry per layer. Buffers, tensors in
attributes, shared parameters and objects without a value cannot be compared. A layer with one of these has no kind, and
the model is traced whole.
"""

from __future__ import annotations

import re
from collections import ChainMap, Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby, zip_longest
from types import BuiltinFunctionType, FunctionType
from typing import Any, cast

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument
from torch.utils._pytree import tree_structure

from llmc.runtime.cache_shape import CacheShape

_TRACED = 3
"""Traced layers of a kind: the first may compute what all read, and the next two are compared."""

_INDEX = ("layer_idx", "layer_id")
_VALUES = (type(None), bool, int, float, str, torch.dtype, torch.device, type, FunctionType, BuiltinFunctionType)
_PARTS = ("_parameters", "_modules", "_buffers")


class NotRepeatableError(Exception):
    """The program cannot be built from a few layers, for the reason in the message: trace the model whole."""


@torch.library.custom_op("llmc::layer", mutates_args=())
def layer_mark(hidden: Tensor) -> Tensor:
    """Return the hidden states unchanged: marks where a layer begins, and where the last one ends."""
    return hidden.clone()


@layer_mark.register_fake
def _(hidden: Tensor) -> Tensor:
    return hidden.clone()


@dataclass(frozen=True)
class LayerPlan:
    """The traced layers of a model, and the traced layer that each layer equals."""

    kinds: tuple[int, ...]
    """Kind of each layer of the model; equal numbers are one kind."""
    path: str
    """Path of the model's list of layers, such as "model.layers"."""

    @classmethod
    def of(cls, model: nn.Module) -> LayerPlan | None:
        """The plan, or None where the model must be traced whole: few layers of each kind, or layers without a kind."""
        try:
            plan = cls(layer_kinds(model), layers_of(model))
        except NotRepeatableError:
            return None
        return plan if len(plan.traced) < len(plan.kinds) else None

    @cached_property
    def traced(self) -> list[int]:
        """Indices of the traced layers in the model, ascending."""
        return [i for i, kind in enumerate(self.kinds) if self.kinds[:i].count(kind) < _TRACED]

    @cached_property
    def like(self) -> list[int]:
        """For each layer of the model, the index among the traced ones of the layer with its operators."""
        traced = self.traced
        offsets = {self.kinds[i]: index for index, i in enumerate(traced)}
        return [traced.index(i) if i in traced else offsets[kind] for i, kind in enumerate(self.kinds)]

    @cached_property
    def steady(self) -> list[tuple[int, int]]:
        """Indices of the last two traced layers of each repeated kind, which must be identical."""
        offsets: dict[int, list[int]] = {}
        for index, i in enumerate(self.traced):
            offsets.setdefault(self.kinds[i], []).append(index)
        return [(p[-2], p[-1]) for kind, p in offsets.items() if self.kinds.count(kind) > _TRACED]

    def apply(self, model: nn.Module) -> None:
        """Leave only the traced layers, renumbered, and mark where each begins and the last one ends."""
        owner, _, leaf = self.path.rpartition(".")
        config: Any = model.config
        layers: Any = model.get_submodule(self.path)
        kept = nn.ModuleList(layers[i] for i in self.traced)
        for index, layer in enumerate(kept):
            for module in layer.modules():
                for name in _INDEX:
                    if hasattr(module, name):
                        setattr(module, name, index)
            layer.register_forward_pre_hook(_mark_input)
        kept[-1].register_forward_hook(_mark_output)
        for name, values in _lists(config, len(self.kinds)).items():
            setattr(config, name, [values[i] for i in self.traced])
        config.num_hidden_layers = len(kept)
        setattr(model.get_submodule(owner), leaf, kept)


def _mark_input(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    return (torch.ops.llmc.layer(args[0]), *args[1:]) if args and isinstance(args[0], Tensor) else None


def _mark_output(_: nn.Module, __: Any, hidden: Any) -> Any:
    if isinstance(hidden, tuple):  # attention weights or a cache may come with them
        return (torch.ops.llmc.layer(hidden[0]), *hidden[1:])
    return torch.ops.llmc.layer(hidden) if isinstance(hidden, Tensor) else None


def layers_of(model: nn.Module) -> str:
    """Path of the decoder layers: the only list with as many modules as the model has layers, outside other lists.
    Raises NotRepeatableError."""
    count: Any = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    found = [name for name in outermost if len(cast(nn.ModuleList, model.get_submodule(name))) == count]
    if len(found) != 1:
        raise NotRepeatableError("the decoder layers are not one list")
    return str(found[0])


def layer_kinds(model: nn.Module) -> tuple[int, ...]:
    """Kind of each decoder layer, as the index of the first equal one. Raises NotRepeatableError."""
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
    """Lists of the configuration with an entry for each layer."""
    return {name: v for name, v in vars(config).items() if isinstance(v, list | tuple) and len(v) == layers}


def _module(module: nn.Module, config: Any, layer: int) -> Any:
    """Everything in a module but its layer's index and its weights' values."""
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
    """A comparable form of `value`, equal between two layers exactly where `value` means the same in both."""
    if value is config or isinstance(value, _VALUES):
        return type(value), value if value is not config else None
    if isinstance(value, Mapping):
        return type(value), [(_value(k, config), _value(v, config)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [_value(v, config) for v in value]
    if isinstance(value, set | frozenset) and all(isinstance(v, str) for v in value):
        return type(value), value
    raise NotRepeatableError(f"an attribute is a {type(value).__name__}")


_CACHE = re.compile(r"cache\.(\d+)$")
_NUMBER = re.compile(r"_\d+$")
_SIZES = (torch.SymInt, torch.SymBool, torch.SymFloat)
_BEFORE = -1
"""Owner of nodes that come before all layers; nodes after them have the number of traced layers."""


def repeat(
    exported: ExportedProgram, plan: LayerPlan, cache: CacheShape, inputs: Sequence[str], example: tuple[Any, ...],
    tensors: Mapping[str, Tensor],
) -> ExportedProgram:  # fmt: skip
    """Build the whole model's program from `exported`, the trace of `plan`'s layers. Raises NotRepeatableError.

    `cache` is that of the traced layers. `inputs` names the inputs of `exported` after parameters, in order: "cache.0"
    … and weights as the model names them. `example` has the structure of the whole program's arguments, and `tensors`
    are the parameters that it holds.
    """
    return _Repeating(exported, plan, cache, inputs).program(example, tensors)


class _Repeating:
    def __init__(
        self, exported: ExportedProgram, plan: LayerPlan, cache: CacheShape, inputs: Sequence[str]
    ) -> None:  # fmt: skip
        self.exported = exported
        self.plan = plan
        self.entries = [[i for i, t in enumerate(cache) if t.layer == index] for index in range(len(plan.traced))]
        """Indices of each traced layer's cache tensors."""
        self.cache = cache
        self.count = len(plan.traced)
        self.layer = re.compile(rf"(?:^|\.){re.escape(plan.path)}\.(\d+)\.")
        nodes = list(exported.graph_module.graph.nodes)
        self.marks = [n for n in nodes if n.target is torch.ops.llmc.layer.default]
        if len(self.marks) != self.count + 1:
            raise NotRepeatableError(f"{len(self.marks)} marks of {self.count} layers")
        self.placeholders = [n for n in nodes if n.op == "placeholder"]
        self.owners = self._owners(iter(inputs))
        self.before: list[fx.Node] = []
        self.layers: list[list[fx.Node]] = [[] for _ in plan.traced]
        self.after: list[fx.Node] = []
        self.home = dict.fromkeys(self.placeholders, _BEFORE)
        parts, at = [self.before, *self.layers, self.after], _BEFORE
        for node in nodes[len(self.placeholders) : -1]:
            if node in self.marks:
                at += 1
                self.home[node] = at
            else:
                parts[at + 1].append(node)
                self.home[node] = at
        self.outputs: Sequence[fx.Node] = nodes[-1].args[0]
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        """The copy of each traced node; for a node of a layer, the copy in the traced layer."""
        self.inputs: list[dict[fx.Node, fx.Node]] = [{} for _ in plan.kinds]
        """For each layer of the model, its own placeholders, by the traced ones."""

    def _owners(self, inputs: Iterator[str]) -> dict[fx.Node, int]:
        """Index of the layer whose weight or cache each placeholder is."""
        owners: dict[fx.Node, int] = {}
        for node, spec in zip(self.placeholders, self.exported.graph_signature.input_specs, strict=True):
            name = next(inputs) if spec.kind == InputKind.USER_INPUT else str(spec.target)
            if found := self.layer.search(name):
                owners[node] = int(found[1])
            elif found := _CACHE.match(name):
                owners[node] = self.cache.tensors[int(found[1])].layer
        return owners

    def program(self, example: tuple[Any, ...], tensors: Mapping[str, Tensor]) -> ExportedProgram:
        self._check()
        specs = self._placeholders()
        self._copy(self.before, self.copies, named=True)
        hidden = self.copies[self.marks[0].args[0]]
        envs = []
        for layer, index in enumerate(self.plan.like):
            own = self.inputs[layer] | {self.marks[index]: hidden}
            own_and_shared = ChainMap(own, self.copies)
            self._copy(self.layers[index], own_and_shared, named=index == layer)
            if self.plan.traced[index] == layer:
                self.copies |= own
            hidden = own_and_shared[self.marks[index + 1].args[0]]
            envs.append(own_and_shared)
        self.copies[self.marks[-1]] = hidden
        self._copy(self.after, self.copies)
        built = [self.copies[n] for n in self.outputs[: self._head]]
        built += [
            env[entry] for index, env in zip(self.plan.like, envs, strict=True) for entry in self._new_entries(index)
        ]
        self.graph.output(tuple(built))
        signature = self.exported.graph_signature
        out_specs = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(n.name), None) for n in built]
        root = self.exported.module_call_graph[0]
        assert root.signature is not None
        whole = replace(
            root.signature, in_spec=tree_structure((example, {})), out_spec=tree_structure((0,) * len(built))
        )
        return ExportedProgram(
            self.exported.graph_module, self.graph,
            replace(signature, input_specs=specs, output_specs=out_specs), dict(tensors),
            self.exported.range_constraints, [replace(root, signature=whole)],
            constants=self.exported.constants, verifiers=self.exported.verifiers,
        )  # fmt: skip

    def _placeholders(self) -> list[Any]:
        """Create the whole program's placeholders, in the order of a whole trace, and return their input specs."""
        specs: list[Any] = []
        given = zip(self.placeholders, self.exported.graph_signature.input_specs, strict=True)
        for owned, group in groupby(given, lambda pair: pair[0] in self.owners):
            pairs = list(group)
            if not owned:
                for node, spec in pairs:
                    self.copies[node] = self._placeholder(node, node.name)
                    specs.append(spec)
                continue
            first = 0
            for layer, index in enumerate(self.plan.like):
                for node, spec in pairs:
                    if self.owners[node] != index:
                        continue
                    name = self._input_name(node.name, index, layer, first)
                    built = self.inputs[layer][node] = self._placeholder(node, name)
                    if self.plan.traced[index] == layer:
                        self.copies[node] = built
                    target = spec.target and self._renamed(spec.target, ".", index, layer)
                    specs.append(replace(spec, arg=TensorArgument(built.name), target=target))
                first += len(self.entries[index])
        return specs

    def _placeholder(self, node: fx.Node, name: str) -> fx.Node:
        built = self.graph.placeholder(name)
        built.meta = {"val": node.meta["val"]}
        return built

    def _copy(self, nodes: Sequence[fx.Node], env: MutableMapping[fx.Node, fx.Node], named: bool = False) -> None:
        """Copy nodes that read through `env`, and add the copies to it; `named` keeps their names."""
        for node in nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            name = node.name if named else _NUMBER.sub("", node.name)
            built = env[node] = self.graph.create_node(node.op, node.target, args, kwargs, name, node.type)
            built.meta = {key: node.meta[key] for key in ("val",) if key in node.meta}

    def _check(self) -> None:
        """Raise NotRepeatableError for reads that layers may not make, and for layers of a kind that differ."""
        for index, nodes in enumerate([*self.layers, self.after]):
            for node in nodes:
                self._check_reads(node, index)
        for index in range(self.count):
            own = [self.marks[index + 1].args[0], *self._new_entries(index)]
            if any(self.home.get(node) != index or node in self.marks for node in own):
                raise NotRepeatableError(f"layer {index} does not compute its own hidden states and cache")
        for node in self.before:
            if isinstance(node.meta.get("val"), Tensor) and any(n in self.owners for n in node.all_input_nodes):
                raise NotRepeatableError(f"{node.name} reads a layer's tensor before all layers")
        head = self.outputs[: self._head]
        if any(0 <= self.home[n] < self.count for n in head) or self.home[self.marks[0].args[0]] != _BEFORE:
            raise NotRepeatableError("the results are not computed after the layers")
        for first, second in self.plan.steady:
            for a, b in zip_longest(self._said(first), self._said(second)):
                if a != b:
                    raise NotRepeatableError(f"layers {first} and {second} of one kind differ: {a} and {b}")

    def _check_reads(self, node: fx.Node, index: int) -> None:
        for read in node.all_input_nodes:
            if read in self.marks:
                allowed = read is self.marks[index]
            elif read in self.owners:
                allowed = self.owners[read] == index
            else:
                allowed = self.home[read] in (index, _BEFORE) or isinstance(read.meta.get("val"), _SIZES)
            if not allowed:
                raise NotRepeatableError(
                    f"{node.name} reads {read.name}, which is neither its layer's nor every layer's"
                )

    def _new_entries(self, index: int) -> Sequence[fx.Node]:
        return [self.outputs[self._head + i] for i in self.entries[index]]

    @property
    def _head(self) -> int:
        """Number of outputs before those of the cache."""
        return len(self.outputs) - len(self.cache)

    def _input_name(self, name: str, index: int, layer: int, first: int) -> str:
        """Name of another layer's placeholder; that layer's cache tensors begin with number `first`."""
        if found := re.match(r"cache_(\d+)$", name):
            return f"cache_{first + self.entries[index].index(int(found[1]))}"
        return self._renamed(name, "_", index, layer)

    def _said(self, index: int) -> Iterator[str]:
        """Text of a traced layer, one line per operator, in terms that layers of its kind share."""
        names = {node: f"%{i}" for i, node in enumerate(self.layers[index])} | {self.marks[index]: "%hidden"}
        symbols: dict[Any, Any] = {}
        for node, owner in self.owners.items():
            if owner == index:
                names[node] = f"%own {self._input_name(node.name, index, 0, 0)}"
                for axis, size in enumerate(node.meta["val"].shape):
                    if isinstance(size, torch.SymInt):
                        symbols.setdefault(size.node.expr, sympy.Symbol(f"{names[node]} {axis}"))

        @cache
        def written(expression: Any) -> str:
            return str(sympy.expand(expression.xreplace(symbols)))

        def built(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.dtype, built(value.shape), built(value.stride())
            if isinstance(value, list | tuple):
                return [built(v) for v in value]
            return written(value.node.expr) if isinstance(value, _SIZES) else value

        for node in self.layers[index]:
            given = fx.map_arg((node.args, node.kwargs), lambda n: _Named(names.get(n, n.name)))
            yield f"{node.op} {node.target} {given} {built(node.meta.get('val'))}"
        yield " ".join(names[n] for n in (self.marks[index + 1].args[0], *self._new_entries(index)))

    def _renamed(self, name: str, dot: str, index: int, layer: int) -> str:
        """Replace `index` by `layer` in a weight's name, whose parts are separated by `dot`."""
        path = self.plan.path.replace(".", dot) + dot
        return name.replace(f"{path}{index}{dot}", f"{path}{layer}{dot}", 1)


class _Named(str):
    __repr__ = str.__str__
