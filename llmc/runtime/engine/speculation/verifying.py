"""Taking as much of a step's drafts as sampling confirms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from llmc.errors import InputError
from llmc.runtime.engine.sampling.batch import sample

if TYPE_CHECKING:
    from llmc.runtime.engine.sampling.batch import Samplers, Take
    from llmc.runtime.engine.sampling.filters import Logits
    from llmc.runtime.engine.scheduling.base import Row
    from llmc.runtime.executors.base import Executor


@dataclass(frozen=True, slots=True)
class AcceptedDrafts:
    """Of row `row` of a step, the first `held` of its drafts were right."""

    row: int
    held: int


def verify(logits: Logits, rows: Sequence[Row], samplers: Samplers, take: Take) -> list[AcceptedDrafts]:
    """Sample after each token of each row in turn, until a token is not the draft's or ends its sequence.

    `logits` [sum of the rows' tokens, V] are those after every token, row by row. samplers[i] belongs to rows[i], a
    decode row; None for a row that nobody waits for. `take` gets every token once, a sequence's in their order, and
    None where it fails. How many drafts held comes back for the rows that had some.
    """
    starts = [0, *accumulate(len(row.tokens) for row in rows)]
    held = [0] * len(rows)
    going = [i for i, sampler in enumerate(samplers) if sampler is not None]
    place = 0
    while going:
        chosen = sample(logits[[starts[i] + place for i in going]], [s for i in going if (s := samplers[i])])
        still = []
        for i, token, logprobs in zip(going, chosen.ids, chosen.logprobs, strict=True):
            goes_on = take(i, token, logprobs)
            if place < rows[i].drafted and token == rows[i].tokens[place + 1]:
                held[i] += 1
                if goes_on:
                    still.append(i)
        going = still
        place += 1
    return [AcceptedDrafts(i, held[i]) for i, row in enumerate(rows) if row.drafted and samplers[i] is not None]


def require_verifiable(executor: Executor) -> None:
    """Raise InputError, saying what to compile, unless the executor gives the logits after each of a row's tokens."""
    path = executor.bundle.path
    if executor.bundle.cache_shape.states:
        raise InputError(
            f"{path}: its model keeps states, out of which no drafted token can be taken back: leave speculation out"
        )
    if not executor.capabilities.exact:
        raise InputError(
            f"{path}: its graphs have fixed shapes, which take one token of a sequence a step, and speculation "
            "verifies several: leave speculation out, or compile without --specialise"
        )
    if not executor.capabilities.scores_each:
        raise InputError(
            f"{path}: its graphs give logits after the last token of a row only, and speculation verifies several: "
            "leave speculation out, or compile again, for device openvino or cpu, without --specialise"
        )
