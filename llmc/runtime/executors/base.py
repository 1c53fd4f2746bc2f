"""The contract between the engine and whatever replays executables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.step import Step


class Executor(ABC):
    """Replays a bundle's executables over a cache of `slots` sequences of up to `capacity` tokens each.

    The cache is the executor's own, in the layout its device likes; the engine names slots and lengths. Decode runs
    over slots 0 … n − 1, so an engine keeps live sequences in the first slots (`copy_prefix` moves one down).
    """

    name: ClassVar[str]
    prompt_chunk: ClassVar[int | None] = None
    """Tokens of a prompt step that run fastest where any shape runs; None: the more the better."""

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        self.bundle = bundle
        self.slots = slots
        self.capacity = capacity
        self.threads = threads

    @classmethod
    @abstractmethod
    def check(cls, bundle: Bundle) -> None:
        """Raise DeviceError or ArtifactError when this host cannot run `bundle`, saying what differs."""

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether any shape runs as it is, so that nothing needs padding to a bucket."""

    @abstractmethod
    def run(self, step: Step) -> NDArray[np.float32]:
        """Append the step's new tokens to their slots and return each row's last live logits, [B, V].

        The array is the executor's buffer: valid until the next `run`, and only in its first len(step.slots) rows.
        """

    @abstractmethod
    def executable_of(self, step: Step) -> str:
        """Name of the executable that `run` would replay."""

    @abstractmethod
    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` cached tokens of slot `source` to slot `target`."""

    @abstractmethod
    def export_prefix(self, slot: int, length: int) -> list[NDArray[np.float32]]:
        """Copies of the first `length` cached tokens: each layer's key and value, [kv_heads, length, head_dim]."""

    @abstractmethod
    def import_prefix(self, slot: int, prefix: list[NDArray[np.float32]]) -> None:
        """Put tensors of `export_prefix`, of this or another executor of the model, at the start of slot `slot`."""

    @abstractmethod
    def poison(self, slot: int, start: int, value: float) -> None:
        """Fill slot `slot` from token `start` on with `value`; verification proves that padding cannot leak."""

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes held, by purpose (`cache`, `executables`…)."""

    @abstractmethod
    def open_all(self) -> None:
        """Open every executable before returning, for a server that wants no first use to be slower."""

    def warm(self, steps: list[tuple[str, int, int, int]]) -> None:
        """Open the executables that (phase, batch, query, context) shapes need before others, the first of them now.

        Others may be opened in the background once the first step has run.
        """
        del steps

    @abstractmethod
    def close(self) -> None:
        """Release everything; the executor cannot be used afterwards."""

    def _check_slots(self, step: Step) -> None:
        if len(step.slots) > step.batch or any(not 0 <= s < self.slots for s in step.slots):
            raise InputError(f"slots {step.slots} do not fit a batch of {step.batch} over {self.slots} slots")
