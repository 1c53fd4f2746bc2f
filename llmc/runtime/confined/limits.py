"""Limits of one job, and the number of concurrent jobs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ChildLimits:
    """Limits on jobs of one kind.

    Each job may use `seconds` of CPU time, `memory_bytes` beyond the child's initial memory, and `stack_bytes`. At most
    `workers` jobs run and `waiting` jobs wait. One child stays alive; the others exit after `idle_s` without a job,
    which frees their memory.
    """

    seconds: float = 3.0
    memory_bytes: int = 128 << 20
    stack_bytes: int = 16 << 20
    workers: int = 2
    waiting: int = 64
    idle_s: float = 2.0

    @property
    def patience_s(self) -> float:
        """Wall-clock seconds after which a child counts as stuck, even on a busy host."""
        return 30.0 + 10.0 * self.seconds
