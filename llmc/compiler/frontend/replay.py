"""A model that reads its weights as it runs (real_model.py), and whose layers can run again on other hidden states.

Every call of the model passes a layer before any call enters the next. The arguments of each layer's call are kept
until then, which allows another call with other hidden states or other weights. `tail` runs the rest of the model on
such a way's output of the last layer.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llmc.compiler.frontend.real_model import layers_of, streamed_model

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import Checkpoint

_HIDDEN = "hidden_states"


@dataclass
class Way:
    """Hidden states [1, n, width] on their way through the layers, separate from those of call `of` of the model; None
    while still equal to those. `shared`: values that layers leave for later ones, by argument name."""

    of: int
    hidden: Tensor | None = None
    shared: dict[str, MutableMapping[Any, Any]] = field(default_factory=dict)

    def branch(self) -> Way:
        """Start another way from here."""
        return Way(self.of, self.hidden, {name: copy.copy(held) for name, held in self.shared.items()})


@dataclass(frozen=True)
class _Given:
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]

    @property
    def hidden(self) -> Tensor:
        found: Tensor = self.named[_HIDDEN] if _HIDDEN in self.named else self.arguments[0]
        return found


class ReplayedModel:
    """A model that can be replayed; it calls `leaving` with each loaded layer after all calls passed it."""

    def __init__(self, checkpoint: Checkpoint, leaving: Callable[[nn.Module], None]) -> None:
        self._given: dict[int, _Given] = {}
        self._call = threading.local()
        self._in_tuple = False
        self._leave = leaving
        self.model: Any = streamed_model(checkpoint, self._leaving)
        self._stack = layers_of(self.model)
        self.layers = list(self._stack)
        self._last = self.layers[-1]
        for layer in self.layers:
            layer.register_forward_pre_hook(self._entered, with_kwargs=True)
        self._last.register_forward_hook(self._ended)

    @property
    def call(self) -> int:
        number: int = self._call.number
        return number

    def run(self, sequences: Sequence[Sequence[int]], predicted: int) -> list[Tensor]:
        """Call the model with every sequence, and return the logits [n, V] of the first `predicted` ones. The others
        end after the last layer."""

        def one(number: int) -> Tensor | None:
            self._call.number, self._call.whole = number, number < predicted
            try:
                return self._logits(sequences[number])
            except _EndedError:
                return None

        built = self.model.streamed.side_by_side([partial(one, number) for number in range(len(sequences))])
        return [logits for logits in built if logits is not None]

    def through(self, layer: nn.Module, way: Way, weights: Mapping[nn.Module, Tensor] | None = None) -> None:
        """Run `way` through the current layer, with some of its matrices replaced by `weights`."""
        self.model.streamed.require_wanted()
        given, hidden = self._given[way.of], way.hidden
        named = dict(given.named)
        for name, value in named.items():
            if isinstance(value, MutableMapping):
                named[name] = way.shared.setdefault(name, copy.copy(value))
        arguments = given.arguments
        if hidden is None:
            hidden = given.hidden
        if _HIDDEN in named:
            named[_HIDDEN] = hidden
        else:
            arguments = (hidden, *arguments[1:])
        with replaced(weights or {}):
            built = layer.forward(*arguments, **named)
        way.hidden = built[0] if isinstance(built, tuple) else built

    def tail(self, tokens: Sequence[int], way: Way) -> Tensor:
        """Logits [n, V] of a way that passed all layers, once `run` has ended."""
        self._call.number = way.of
        for at in range(len(self.layers)):
            self._stack[at] = _Passing(self.layers[at], self._in_tuple)
        last: Any = self._stack[-1]
        last.out = way.hidden
        try:
            return self._logits(tokens)
        finally:
            for at, layer in enumerate(self.layers):
                self._stack[at] = layer

    def _logits(self, tokens: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
            return logits

    def _entered(self, layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._given[self.call] = _Given(arguments, {**named})

    def _ended(self, layer: nn.Module, arguments: object, built: object) -> None:
        self._in_tuple = isinstance(built, tuple)
        if not self._call.whole:
            raise _EndedError

    def _leaving(self, _: str, unit: nn.Module) -> None:
        if unit in self.layers:
            with torch.inference_mode():
                self._leave(unit)


class _Passing(nn.Module):
    """Stands in for a layer: returns `out`, or its input."""

    def __init__(self, layer: nn.Module, in_tuple: bool) -> None:
        super().__init__()
        self._layer = [layer]  # a list keeps it out of this module's children
        self._in_tuple = in_tuple
        self.out: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._layer[0], name)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        out = self.out if self.out is not None else _Given(arguments, named).hidden
        return (out,) if self._in_tuple else out


class _EndedError(Exception):
    """A call whose remaining work is not needed."""


@contextmanager
def replaced(weights: Mapping[nn.Module, Tensor]) -> Iterator[None]:
    """Use other weights for some matrices within the context."""
    held = {module: module._parameters["weight"] for module in weights}
    for module, weight in weights.items():
        module._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    try:
        yield
    finally:
        for module, parameter in held.items():
            module._parameters["weight"] = parameter
