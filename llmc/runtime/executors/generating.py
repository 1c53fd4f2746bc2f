"""The contract of an executor whose device samples: a prompt goes in, tokens come out, no logits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmc.errors import InputError
from llmc.runtime.cache_shape import ANYWHERE
from llmc.runtime.executors.base import Capabilities, Executor
from llmc.runtime.executors.slots import SlotLengths

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.step import Step
    from llmc.runtime.top_logits import TopLogits

Sampling = Mapping[str, float | int]
"""Values of sampling parameters by SamplingParams name."""

GREEDY: Sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
"""Greedy; `top_k` 0: all."""


class GeneratingExecutor(Executor):
    """Generates one sequence at a time in its only slot; SequentialCore queues the others.

    Steps exist for warm-up and verification: `run` generates one greedy token after all tokens of the slot.
    """

    capabilities = Capabilities(exact=True)

    parameters: ClassVar[tuple[str, ...]]
    """Sampling parameters that its device accepts, in addition to max_tokens."""

    defaults: ClassVar[Sampling]
    """Their defaults, if they differ from those of SamplingParams."""

    takes: ClassVar[str]
    """Whose parameters these are, with the source, for errors about other parameters."""

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        """There is one slot, whatever `slots` says."""
        super().__init__(bundle, 1, capacity, threads)
        self._vocab_size = bundle.size("vocab_size")
        self._held: list[int] = []

    @abstractmethod
    def generate(self, prompt: Sequence[int], most: int, sampling: Sampling) -> Generator[int, None, None]:
        """Yield at most `most` tokens after `prompt`; closing the generator stops the device at once.

        It may end at an end token, yielded or not. `sampling` has a value for each of `parameters`. Raises DeviceError.
        """

    @property
    def executable(self) -> str:
        return str(self.bundle.executable("any", None, None, None))

    def executable_of(self, step: Step) -> str:
        return self.executable

    def run(self, step: Step) -> NDArray[np.float32]:
        held = SlotLengths(1, ANYWHERE)
        held.wrote(0, 0, len(self._held))
        self._check_step(step, held)
        past, new = int(step.past_lengths[0]), int(step.new_lengths[0])
        tokens = [*self._held[:past], *(int(token) for token in step.token_ids[0, :new])]
        if len(tokens) >= self.capacity:
            raise InputError(f"{len(tokens)} tokens leave no room for one more in {self.capacity}")
        stream = self.generate(tokens, 1, GREEDY)
        try:
            token = next(stream, None)
        finally:
            stream.close()
        self._held = tokens
        row = np.zeros((1, self._vocab_size), np.float32)
        row[0, next(iter(self.bundle.eos_token_ids), 0) if token is None else token] = 1
        self._keep(row)
        return row

    def run_top(self, step: Step) -> TopLogits:
        raise self._no_logits()

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        if source or target or length > len(self._held):
            raise InputError(f"slot {source} has no {length} tokens to copy to slot {target}")
        del self._held[length:]

    def export_prefix(self, slot: int, length: int) -> list[NDArray[np.float32]]:
        raise self._no_logits()

    def import_prefix(self, slot: int, prefix: list[NDArray[np.float32]]) -> None:
        raise self._no_logits()

    def nan_fill(self, slot: int, start: int, value: float) -> None:
        raise self._no_logits()

    def _no_logits(self) -> InputError:
        return InputError(f"{self.bundle.path}: its device returns tokens only; logits, keys and values stay on it")
