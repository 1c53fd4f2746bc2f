"""Limits of one job, and the number of jobs at a time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ChildLimits:
    """Bounds on jobs of one kind.

    `seconds` of processor time, `memory_bytes` beyond what a child begins with and `stack_bytes` are for each job.
    `workers` run at a time; further ones wait, `waiting` at most. One child stays; the others end, and their memory
    with them, when they have had no job for `idle_s`.
    """

    seconds: float = 3.0
    memory_bytes: int = 128 << 20
    stack_bytes: int = 16 << 20
    workers: int = 2
    waiting: int = 64
    idle_s: float = 2.0

    @property
    def patience_s(self) -> float:
        """Seconds by the clock after which a child counts as stuck, on a host however busy."""
        return 30.0 + 10.0 * self.seconds
