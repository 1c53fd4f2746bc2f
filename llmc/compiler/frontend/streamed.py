"""A model whose weights are read as it runs: a layer at a time, so that memory for the largest is enough.

A unit is a decoder layer, or a large embedding or projection outside of them. Before a unit runs its tensors are read,
and those of the unit before are given back. Of several calls `side_by_side` each goes through a unit in turn, which is
then read once for all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
Fill = Callable[[str, Tensor], None]
"""Writes a parameter of the model, by its name, into a tensor of its shape."""
Leaving = Callable[[str, nn.Module], None]
"""Takes a unit's name, and the unit with its weights."""

LARGE = 1 << 24
"""Values of a matrix outside of layers from which on it is a unit; what is smaller stays."""


class StreamedWeights:
    """Gives `model`, whose parameters are on the meta device, what `fill` writes: its `layers` and large matrices as
    they run, all others now. After each unit `done` is called, and before its weights go `leaving`. Raises what `fill`
    raises, also as the model runs."""

    def __init__(
        self, model: nn.Module, layers: Sequence[nn.Module], fill: Fill, done: Callable[[], None],
        leaving: Leaving = lambda *_: None,
    ) -> None:  # fmt: skip
        self._fill, self._done, self._leaving = fill, done, leaving
        self._held: nn.Module | None = None
        self._free: dict[torch.Size, list[Tensor]] = {}
        self._turns: _Turns | None = None
        names = {module: name for name, module in model.named_modules()}
        inside = {module for layer in layers for module in layer.modules()}
        large = [module for module in model.modules() if module not in inside and _is_large(module)]
        self._prefixes = {unit: f"{names[unit]}." for unit in (*layers, *large)}
        for unit in self._prefixes:
            unit.register_forward_pre_hook(self._before)
        within = tuple(self._prefixes.values())
        self._put(model, [name for name in _parameters(model) if not name.startswith(within)], "")

    def _before(self, unit: nn.Module, _: object) -> None:
        if self._turns is not None:
            self._turns.give_on()
        if unit is self._held:
            return
        if self._held is not None:
            self._give_back(self._held)
        self._put(unit, _parameters(unit), self._prefixes[unit])
        self._free.clear()
        self._held = unit
        self._done()

    def _give_back(self, unit: nn.Module) -> None:
        self._leaving(self._prefixes[unit].removesuffix("."), unit)
        for name in _parameters(unit):
            tensor = unit.get_parameter(name).data
            self._free.setdefault(tensor.shape, []).append(tensor)
            put_parameter(unit, name, tensor.to("meta"))

    def _put(self, module: nn.Module, names: Sequence[str], prefix: str) -> None:
        """Read parameters, as many at a time as torch has threads."""
        tensors = {name: self._room(module.get_parameter(name).shape) for name in names}
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(lambda name: self._fill(prefix + name, tensors[name]), names))
        for name, tensor in tensors.items():
            put_parameter(module, name, tensor)

    def _room(self, shape: torch.Size) -> Tensor:
        """Memory that was given back is not zeroed by the system again, which takes longer than a layer's product."""
        free = self._free.get(shape)
        return free.pop() if free else torch.empty(shape)

    def require_wanted(self) -> None:
        """Raise ReplayStoppedError in calls that `side_by_side` no longer waits for; for what takes long in a unit."""
        if self._turns is not None:
            self._turns.require_wanted()

    def side_by_side(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """What each call of the model gives; raises what the first of them that fails raises. Interrupted, it ends the
        calls before it raises."""
        results: dict[int, T] = {}
        failures: dict[int, BaseException] = {}
        self._turns = turns = _Turns(len(calls))

        def run(index: int) -> None:
            with suppress(ReplayStoppedError), turns.taking_part(index):
                try:
                    results[index] = calls[index]()
                except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
                    failures[index] = error

        threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:  # a thread that computes while the process ends would abort it
            turns.stop([index for index, thread in enumerate(threads) if thread.ident is not None])
            raise
        finally:
            self._turns = None
        if failures:
            raise failures[min(failures)]
        if self._held is not None:
            self._give_back(self._held)
            self._held = None
            self._free.clear()
        return [results[index] for index in range(len(calls))]


def put_parameter(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter by its name."""
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner)._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)


def _parameters(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(remove_duplicate=False)]


def _is_large(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.Linear)) and module.weight.numel() >= LARGE


class ReplayStoppedError(Exception):
    """Nobody waits for a call any more."""


class _Turns:
    """Threads of which one runs at a time, each until it gives its turn on, or raises ReplayStoppedError."""

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._running = list(range(count))
        self._at = 0
        self._stopped = False
        self._own = threading.local()

    @contextmanager
    def taking_part(self, index: int) -> Iterator[None]:
        """The thread's share of the work."""
        self._own.index = index
        try:
            with self._changed:
                self._wait(index)
            yield
        finally:
            with self._changed:
                self._next(index)
                self._running.remove(index)

    def give_on(self) -> None:
        """Let the others run, until it is the thread's turn again."""
        with self._changed:
            self._next(self._own.index)
            self._wait(self._own.index)

    def stop(self, begun: Sequence[int]) -> None:
        """End all of them at their next turn, and wait for those that have begun."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not set(self._running).intersection(begun))

    def require_wanted(self) -> None:
        """Raise ReplayStoppedError where they are to end."""
        if self._stopped:
            raise ReplayStoppedError

    def _wait(self, index: int) -> None:
        self._changed.wait_for(lambda: self._at == index or self._stopped)
        self.require_wanted()

    def _next(self, index: int) -> None:
        later = [other for other in self._running if other > index]
        self._at = later[0] if later else self._running[0]
        self._changed.notify_all()
