"""Decides which sequences run in which step. base.py has the contract; open_scheduler creates the right scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.buckets.plan import Plan
    from llmc.runtime.engine.scheduling.base import Drafter, Scheduler, SchedulerConfig


def open_scheduler(plan: Plan, config: SchedulerConfig, drafter: Drafter | None = None) -> Scheduler:
    """Create the scheduler for an executor that `config` describes; `drafter` drafts tokens for decode steps to verify.

    Raises InputError and ArtifactError as `check_config` does.
    """
    if config.ragged:
        from llmc.runtime.engine.scheduling.ragged import RaggedScheduler

        return RaggedScheduler(plan, config, drafter)
    from llmc.runtime.engine.scheduling.bucketed import BucketScheduler

    return BucketScheduler(plan, config, drafter)
