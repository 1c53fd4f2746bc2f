"""How many tokens each slot of a cache holds, and from where on a step may start there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.runtime.cache_shape import CacheTensor, Rewind


class Held:
    """`used`: tokens of each slot. `floor`: the lowest start of a step in it, besides 0, as `rewind` says."""

    def __init__(self, slots: int, rewind: Rewind) -> None:
        self._rewind = rewind
        self.used = [0] * slots
        self.floor = [0] * slots

    def require(self, slot: int, length: int) -> None:
        """Raise InputError unless the first `length` tokens of a slot can be used without those behind them."""
        used, floor = self.used[slot], self.floor[slot]
        if length > used:
            raise InputError(f"slot {slot} holds {used} tokens, not {length}")
        if 0 < length < floor:
            what = "the states" if self._rewind.states else "its windows"
            raise InputError(
                f"slot {slot} holds {what} after {used} tokens, from which those after {length} cannot be had"
            )

    def first(self, slot: int, t: CacheTensor) -> int:
        """The first token of a slot that a step may still see in a tensor of kind kv."""
        return 0 if t.ring is None or t.window is None else max(0, self.floor[slot] - t.window + 1)

    def wrote(self, slot: int, start: int, end: int) -> None:
        """Tokens `start` … `end` − 1 are in a slot, and are its last."""
        floor = self._rewind.floor(end)
        self.floor[slot] = max(self.floor[slot], floor) if start else floor
        self.used[slot] = end

    def copied(self, source: int, target: int, length: int) -> None:
        """Slot `target` has the first `length` tokens of slot `source`, and no others."""
        self.floor[target] = self.floor[source] if length else 0
        self.used[target] = length

    def imported(self, slot: int, length: int) -> None:
        """A slot has `length` tokens of another executor, of whose windows alone are known."""
        self.floor[slot] = 0 if self._rewind.free else length
        self.used[slot] = length
