"""The reference: the unmodified transformers model with a checkpoint's weights, in float32.

A large model reads its weights as it runs, one unit at a time: a decoder layer, or a large embedding or projection
outside of them. Memory for the largest unit is enough. Several calls `side_by_side` pass each unit in turn, which is
then read once for all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from llmc.compiler.checkpoint.base import coded_names, stored_name
from llmc.compiler.frontend.skeleton import build_skeleton
from llmc.errors import CheckpointError
from llmc.runtime.host import host_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmc.compiler.checkpoint.base import Checkpoint


T = TypeVar("T")
Fill = Callable[[str, Tensor], None]
"""Writes the parameter of a name into a tensor of its shape."""
Leaving = Callable[[str, nn.Module], None]
"""Takes a unit's name, and the unit with its weights."""

LARGE = 1 << 24
"""Values from which on a matrix outside of layers is a unit; smaller ones stay in memory."""


class StreamedWeights:
    """Fills `model`, whose parameters are on the meta device, with the values that `fill` writes: `layers` and large
    matrices as they run, all others now. After each unit `done` is called, and before its weights are released
    `leaving`. Raises what `fill` raises, also as the model runs."""

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
        """Reuse released memory: the system would zero new memory, which takes longer than a layer's matmul."""
        free = self._free.get(shape)
        return free.pop() if free else torch.empty(shape)

    def require_wanted(self) -> None:
        """Raise ReplayStoppedError in a call that `side_by_side` no longer waits for; long operations of a unit check
        it."""
        if self._turns is not None:
            self._turns.require_wanted()

    def side_by_side(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Run the calls of the model together and return their results; raises the first failing call's error. An
        interrupt ends the calls before it is raised."""
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
        except BaseException:  # a thread that still computes would abort the process at its end
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
    """The result of this call is no longer needed."""


class _Turns:
    """Threads of which one runs at a time, each until it yields its turn or raises ReplayStoppedError."""

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._running = list(range(count))
        self._at = 0
        self._stopped = False
        self._own = threading.local()

    @contextmanager
    def taking_part(self, index: int) -> Iterator[None]:
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
        """Let the others run until it is this thread's turn again."""
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
        if self._stopped:
            raise ReplayStoppedError

    def _wait(self, index: int) -> None:
        self._changed.wait_for(lambda: self._at == index or self._stopped)
        self.require_wanted()

    def _next(self, index: int) -> None:
        later = [other for other in self._running if other > index]
        self._at = later[0] if later else self._running[0]
        self._changed.notify_all()


STREAMED = 1 << 30
"""Bytes of a float32 model from which on its weights are not held all at once."""


def load_real_model(checkpoint: Checkpoint) -> nn.Module:
    """Load the checkpoint's model with its weights: float32, eval, transformers' own attention. Raises CheckpointError.
    A large model reads its weights as it runs (`is_streamed`), and has a `streamed` attribute (StreamedWeights)."""
    model, fill = _unfilled(checkpoint)
    size = 4 * sum(parameter.numel() for parameter in model.state_dict().values())
    if is_streamed(checkpoint, size):
        model.streamed = StreamedWeights(model, layers_of(model), fill, checkpoint.forget)
        return model
    for name, parameter in model.state_dict().items():
        fill(name, built := torch.empty(parameter.shape))
        put_parameter(model, name, built)
    model.tie_weights()
    return model


def streamed_model(checkpoint: Checkpoint, leaving: Leaving) -> nn.Module:
    """Load a model of any size that streams its weights, and call `leaving` with each layer after all calls passed
    it."""
    model, fill = _unfilled(checkpoint)
    model.streamed = StreamedWeights(model, layers_of(model), fill, checkpoint.forget, leaving)
    return model


def is_streamed(checkpoint: Checkpoint, size: int) -> bool:
    """Whether weights of `size` bytes in float32 are read again for each token: floats from STREAMED bytes on, and
    quantized weights, which take longer to read, only where all would fill half of this host's memory."""
    if not coded_names(checkpoint):
        return size >= STREAMED
    return size > max(STREAMED, (host_memory() or 0) // 2)


def _unfilled(checkpoint: Checkpoint) -> tuple[PreTrainedModel, Fill]:
    """A model without values, and the function that writes them, without selectable adapters."""
    checkpoint = checkpoint.of_adapter(0)
    model = build_skeleton(checkpoint.config)
    names = set(checkpoint.tensor_names())
    parameters = model.state_dict()
    stored = {name: stored_name(name, names) for name in parameters}
    for name, parameter in parameters.items():
        if (shape := checkpoint.shape(stored[name])) != tuple(parameter.shape):
            raise CheckpointError(f"tensor {name!r} has shape {shape}, the configuration says {tuple(parameter.shape)}")

    known: set[str] = set()

    def fill(name: str, tensor: Tensor) -> None:
        if name in known:
            checkpoint.fill(stored[name], tensor.numpy())
        else:
            tensor.numpy()[...] = checkpoint.tensor(stored[name])
            known.add(name)

    return model, fill


def layers_of(model: Any) -> nn.ModuleList:
    """The decoder's layers."""
    count = model.config.num_hidden_layers
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
