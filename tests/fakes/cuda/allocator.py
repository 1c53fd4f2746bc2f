"""The caching allocator's bookkeeping (c10/cuda/CUDACachingAllocator.cpp): segments of the card, cut into blocks.

A request is rounded to 512 bytes. Up to 1 MiB come out of segments of 2 MiB, up to 10 MiB of such of 20 MiB, more has a
segment of its own, in multiples of 2 MiB. What is freed stays cached, for the same pool alone: that of a stream, or a
private one. Where the card is full, cached segments of the streams' pools, and of private ones that nobody uses any
more, go back to the driver first.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

ROUND, SMALL, SMALL_SEGMENT = 512, 1 << 20, 2 << 20
LARGE, LARGE_SEGMENT, ROUND_LARGE = 10 << 20, 20 << 20, 2 << 20


@dataclass(eq=False)
class Segment:
    pool: Hashable
    small: bool
    size: int
    blocks: list[Block] = field(default_factory=list)


@dataclass(eq=False)
class Block:
    segment: Segment
    begin: int
    size: int
    free: bool = True

    def overlaps(self, other: Block) -> bool:
        """Whether both are, or were, of the same memory."""
        apart = self.begin + self.size <= other.begin or other.begin + other.size <= self.begin
        return self.segment is other.segment and not apart


class Allocator:
    """`held` bytes are graphs' own. `fail_after`: an injected fault, after so many more allocations."""

    def __init__(self, total: int) -> None:
        self.total, self.held = total, 0
        self.segments: list[Segment] = []
        self.users: dict[Hashable, int] = {}
        self.fail_after: int | None = None

    @property
    def reserved(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def available(self) -> int:
        return self.total - self.reserved - self.held

    def malloc(self, size: int, pool: Hashable) -> Block:
        rounded = max(ROUND, -(-size // ROUND) * ROUND)
        if self._fails():
            raise self._full(size)
        small = rounded <= SMALL
        fits = [
            block
            for segment in self.segments
            if segment.pool == pool and segment.small == small
            for block in segment.blocks
            if block.free and block.size >= rounded
        ]
        block = min(fits, key=lambda b: b.size) if fits else self._segment(rounded, pool, small, size)
        return self._split(block, rounded)

    def free(self, block: Block) -> None:
        block.free = True
        joined: list[Block] = []
        for one in block.segment.blocks:
            if joined and joined[-1].free and one.free:
                joined[-1] = Block(one.segment, joined[-1].begin, joined[-1].size + one.size)
            else:
                joined.append(one)
        block.segment.blocks = joined

    def empty_cache(self) -> None:
        """Whole segments that nobody uses go back; a private pool's only once it has no user."""
        self.segments = [
            s for s in self.segments if self.users.get(s.pool) or len(s.blocks) > 1 or not s.blocks[0].free
        ]

    def _segment(self, rounded: int, pool: Hashable, small: bool, requested: int) -> Block:
        size = (
            SMALL_SEGMENT if small else LARGE_SEGMENT if rounded < LARGE else -(-rounded // ROUND_LARGE) * ROUND_LARGE
        )
        if size > self.available:
            self.empty_cache()
        if size > self.available:
            raise self._full(requested)
        segment = Segment(pool, small, size)
        segment.blocks = [Block(segment, 0, size)]
        self.segments.append(segment)
        return segment.blocks[0]

    def _split(self, block: Block, size: int) -> Block:
        rest = block.size - size
        block.free = False
        if rest >= ROUND if block.segment.small else rest > SMALL:
            blocks = block.segment.blocks
            blocks.insert(blocks.index(block) + 1, Block(block.segment, block.begin + size, rest))
            block.size = size
        return block

    def _fails(self) -> bool:
        if self.fail_after is None:
            return False
        self.fail_after -= 1
        return self.fail_after < 0

    def _full(self, size: int) -> Exception:
        return torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {size / (1 << 20):.2f} MiB. GPU 0 has a total capacity of "
            f"{self.total / (1 << 30):.2f} GiB of which {self.available / (1 << 20):.2f} MiB is free."
        )
