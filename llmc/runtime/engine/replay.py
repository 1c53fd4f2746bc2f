"""From the scheduler's work to tokens: the step for the executor, its logits, and what the samplers make of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.engine.sampling.batch import finite, sample, sample_top
from llmc.runtime.step import Step, exact, pad, ragged
from llmc.runtime.top_logits import TopLogits

if TYPE_CHECKING:
    from llmc.runtime.engine.sampling.batch import Samplers, Take
    from llmc.runtime.engine.scheduling.base import ScheduledBatch
    from llmc.runtime.engine.speculation.verifying import AcceptedDrafts
    from llmc.runtime.executors.base import Executor


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave: logits of each row (of each token, where there are drafts), or only the largest of each row."""

    logits: NDArray[np.float32] | None = None
    top: TopLogits | None = None


def step_of(work: ScheduledBatch, takes_ragged: bool) -> Step:
    """The step that `work` is, padded where it has a bucket."""
    step = _without_adapters(work, takes_ragged)
    adapters = tuple([row.adapter for row in work.rows])
    return replace(step, adapters=adapters) if any(adapters) else step


def _without_adapters(work: ScheduledBatch, takes_ragged: bool) -> Step:
    slots, tokens = [row.slot for row in work.rows], [row.tokens for row in work.rows]
    past = [row.start for row in work.rows]
    if takes_ragged:
        return ragged(work.phase, slots, tokens, past, work.decode_rows)
    if work.bucket is None:
        return exact(work.phase, slots, tokens, past)
    return pad(work.bucket, slots, tokens, past)


def replay(executor: Executor, step: Step, work: ScheduledBatch, samplers: Samplers) -> StepResult:
    """Run the step, for no more logits than the samplers need. Raises whatever the executor raises."""
    if any(row.drafted for row in work.rows):
        return StepResult(executor.run_each(step))
    k = executor.bundle.sample_top_k
    if k and all(samplers[i].served_by_top(k) for i in _emitting(work, samplers)):  # type: ignore[union-attr]
        return StepResult(top=executor.run_top(step))
    return StepResult(executor.run(step))


def choose(
    executor: Executor, replayed: StepResult, work: ScheduledBatch, samplers: Samplers, take: Take
) -> list[AcceptedDrafts]:
    """Give `take` a token for each row that emits, or as many as hold of a draft and the one after them.

    Returns how many drafts held, for the rows that had some.
    """
    if any(row.drafted for row in work.rows):
        from llmc.runtime.engine.speculation.verifying import verify

        assert replayed.logits is not None
        return verify(replayed.logits, work.rows, samplers, take)
    for i, row in enumerate(work.rows):
        sampler = samplers[i]
        if not row.emits and sampler is not None:
            read = replayed.logits if replayed.top is None else replayed.top.values
            assert read is not None
            if not finite(read[i], sampler):
                take(i, None, None)
    emitting = _emitting(work, samplers)
    if not emitting:
        return []
    wanted = [one for i in emitting if (one := samplers[i]) is not None]
    rows: Any = slice(len(emitting)) if emitting[-1] == len(emitting) - 1 else np.array(emitting)
    if replayed.top is not None:
        chosen = sample_top(replayed.top.rows(rows), wanted, lambda: executor.logits()[rows])
    else:
        assert replayed.logits is not None
        chosen = sample(replayed.logits[rows], wanted)
    for i, token, logprobs in zip(emitting, chosen.ids, chosen.logprobs, strict=True):
        take(i, token, logprobs)
    return []


def _emitting(work: ScheduledBatch, samplers: Samplers) -> list[int]:
    return [i for i, row in enumerate(work.rows) if row.emits and samplers[i] is not None]
