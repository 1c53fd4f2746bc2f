"""The program of a whole model from the trace of a few of its layers (layer_kinds.py says which).

Marks cut the traced graph into what comes before the layers, the layers, and what comes after. A layer may read

  - the hidden states that the one before it left, its own weights and its own cache;
  - inputs of no layer, and what comes before all layers;
  - a size that an earlier layer computed.

What reads anything else cannot be repeated. The last two traced layers of a kind have to be the same in all but whose
weights and cache they read; then every other layer of the kind is a copy of the last one, in the model's order. The
result has the inputs, outputs and operators of a whole trace. Names of operators may differ, and guards on sizes that a
whole trace repeats for each layer are there once for each traced one.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby, zip_longest
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument
from torch.utils._pytree import tree_structure

from llmc.compiler.frontend.layer_kinds import LayerPlan, NotRepeatableError
from llmc.runtime.cache_shape import CacheShape

_CACHE = re.compile(r"cache\.(\d+)$")
_NUMBER = re.compile(r"_\d+$")
_SIZES = (torch.SymInt, torch.SymBool, torch.SymFloat)
_BEFORE = -1
"""Where nodes are that belong to no layer and come before all of them; those after have the number of traced layers."""


def repeat(
    exported: ExportedProgram, plan: LayerPlan, cache: CacheShape, inputs: Sequence[str], example: tuple[Any, ...],
    tensors: Mapping[str, Tensor],
) -> ExportedProgram:  # fmt: skip
    """The whole model's program from `exported`, the trace of `plan`'s layers. Raises NotRepeatableError.

    `cache` is that of the traced layers. `inputs` names what `exported` takes beside parameters, in order: "cache.0" …
    and weights as the model names them.
    `example` has the structure of the whole program's arguments, and `tensors` are the parameters that it holds.
    """
    return _Repeating(exported, plan, cache, inputs).program(example, tensors)


class _Repeating:
    def __init__(
        self, exported: ExportedProgram, plan: LayerPlan, cache: CacheShape, inputs: Sequence[str]
    ) -> None:  # fmt: skip
        self.exported = exported
        self.plan = plan
        self.entries = [[i for i, t in enumerate(cache) if t.layer == place] for place in range(len(plan.traced))]
        """Of each traced layer the places of its cache tensors."""
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
        """What has become of each traced node; of a layer's, in the layer that was traced."""
        self.inputs: list[dict[fx.Node, fx.Node]] = [{} for _ in plan.kinds]
        """Of each layer of the model, its own placeholders, by the traced ones."""

    def _owners(self, inputs: Iterator[str]) -> dict[fx.Node, int]:
        """The place of the layer whose weight or cache a placeholder is."""
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
        for layer, place in enumerate(self.plan.like):
            own = self.inputs[layer] | {self.marks[place]: hidden}
            own_and_shared = ChainMap(own, self.copies)
            self._copy(self.layers[place], own_and_shared, named=place == layer)
            if self.plan.traced[place] == layer:
                self.copies |= own
            hidden = own_and_shared[self.marks[place + 1].args[0]]
            envs.append(own_and_shared)
        self.copies[self.marks[-1]] = hidden
        self._copy(self.after, self.copies)
        made = [self.copies[n] for n in self.outputs[: self._head]]
        made += [
            env[entry] for place, env in zip(self.plan.like, envs, strict=True) for entry in self._new_entries(place)
        ]
        self.graph.output(tuple(made))
        signature = self.exported.graph_signature
        out_specs = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(n.name), None) for n in made]
        root = self.exported.module_call_graph[0]
        assert root.signature is not None
        whole = replace(
            root.signature, in_spec=tree_structure((example, {})), out_spec=tree_structure((0,) * len(made))
        )
        return ExportedProgram(
            self.exported.graph_module, self.graph,
            replace(signature, input_specs=specs, output_specs=out_specs), dict(tensors),
            self.exported.range_constraints, [replace(root, signature=whole)],
            constants=self.exported.constants, verifiers=self.exported.verifiers,
        )  # fmt: skip

    def _placeholders(self) -> list[Any]:
        """Make the whole program's placeholders, in the order of a whole trace; their input specs."""
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
            for layer, place in enumerate(self.plan.like):
                for node, spec in pairs:
                    if self.owners[node] != place:
                        continue
                    name = self._input_name(node.name, place, layer, first)
                    made = self.inputs[layer][node] = self._placeholder(node, name)
                    if self.plan.traced[place] == layer:
                        self.copies[node] = made
                    target = spec.target and self._renamed(spec.target, ".", place, layer)
                    specs.append(replace(spec, arg=TensorArgument(made.name), target=target))
                first += len(self.entries[place])
        return specs

    def _placeholder(self, node: fx.Node, name: str) -> fx.Node:
        made = self.graph.placeholder(name)
        made.meta = {"val": node.meta["val"]}
        return made

    def _copy(self, nodes: Sequence[fx.Node], env: MutableMapping[fx.Node, fx.Node], named: bool = False) -> None:
        """Add copies that read what `env` says, and put them there; `named`: under the names that they have."""
        for node in nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            name = node.name if named else _NUMBER.sub("", node.name)
            made = env[node] = self.graph.create_node(node.op, node.target, args, kwargs, name, node.type)
            made.meta = {key: node.meta[key] for key in ("val",) if key in node.meta}

    def _check(self) -> None:
        """Raise NotRepeatableError for what layers may not read, and for layers of a kind that differ."""
        for place, nodes in enumerate([*self.layers, self.after]):
            for node in nodes:
                self._check_reads(node, place)
        for place in range(self.count):
            own = [self.marks[place + 1].args[0], *self._new_entries(place)]
            if any(self.home.get(node) != place or node in self.marks for node in own):
                raise NotRepeatableError(f"layer {place} does not make its own hidden states and cache")
        for node in self.before:
            if isinstance(node.meta.get("val"), Tensor) and any(n in self.owners for n in node.all_input_nodes):
                raise NotRepeatableError(f"{node.name} reads a layer's tensor before all layers")
        head = self.outputs[: self._head]
        if any(0 <= self.home[n] < self.count for n in head) or self.home[self.marks[0].args[0]] != _BEFORE:
            raise NotRepeatableError("the results are not made after the layers")
        for first, second in self.plan.steady:
            for a, b in zip_longest(self._said(first), self._said(second)):
                if a != b:
                    raise NotRepeatableError(f"layers {first} and {second} of one kind differ: {a} and {b}")

    def _check_reads(self, node: fx.Node, place: int) -> None:
        for read in node.all_input_nodes:
            if read in self.marks:
                allowed = read is self.marks[place]
            elif read in self.owners:
                allowed = self.owners[read] == place
            else:
                allowed = self.home[read] in (place, _BEFORE) or isinstance(read.meta.get("val"), _SIZES)
            if not allowed:
                raise NotRepeatableError(
                    f"{node.name} reads {read.name}, which is neither its layer's nor every layer's"
                )

    def _new_entries(self, place: int) -> Sequence[fx.Node]:
        return [self.outputs[self._head + i] for i in self.entries[place]]

    @property
    def _head(self) -> int:
        """Outputs before those of the cache."""
        return len(self.outputs) - len(self.cache)

    def _input_name(self, name: str, place: int, layer: int, first: int) -> str:
        """The name of another layer's placeholder, whose cache tensors begin with number `first`."""
        if found := re.match(r"cache_(\d+)$", name):
            return f"cache_{first + self.entries[place].index(int(found[1]))}"
        return self._renamed(name, "_", place, layer)

    def _said(self, place: int) -> Iterator[str]:
        """A traced layer, a line for each operator, in terms that layers of its kind share."""
        names = {node: f"%{i}" for i, node in enumerate(self.layers[place])} | {self.marks[place]: "%hidden"}
        symbols: dict[Any, Any] = {}
        for node, owner in self.owners.items():
            if owner == place:
                names[node] = f"%own {self._input_name(node.name, place, 0, 0)}"
                for axis, size in enumerate(node.meta["val"].shape):
                    if isinstance(size, torch.SymInt):
                        symbols.setdefault(size.node.expr, sympy.Symbol(f"{names[node]} {axis}"))

        @cache
        def written(expression: Any) -> str:
            return str(sympy.expand(expression.xreplace(symbols)))

        def made(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.dtype, made(value.shape), made(value.stride())
            if isinstance(value, list | tuple):
                return [made(v) for v in value]
            return written(value.node.expr) if isinstance(value, _SIZES) else value

        for node in self.layers[place]:
            given = fx.map_arg((node.args, node.kwargs), lambda n: _Named(names.get(n, n.name)))
            yield f"{node.op} {node.target} {given} {made(node.meta.get('val'))}"
        yield " ".join(names[n] for n in (self.marks[place + 1].args[0], *self._new_entries(place)))

    def _renamed(self, name: str, dot: str, place: int, layer: int) -> str:
        """A weight's name, whose parts `dot` parts, with `layer` for `place`."""
        path = self.plan.path.replace(".", dot) + dot
        return name.replace(f"{path}{place}{dot}", f"{path}{layer}{dot}", 1)


class _Named(str):
    """A node in the text of another one's arguments."""

    __repr__ = str.__str__
