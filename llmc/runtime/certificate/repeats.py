"""Answers of requests that ran beside others, compared with the same requests alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.runtime.certificate.requests import RandomRequest
    from llmc.runtime.engine.generator import Generator
    from llmc.runtime.engine.requests import Request, Update

TIE_NATS = 1e-3
"""Two tokens whose log probabilities are this near are a tie, which another bucket's order of sums may break."""


@dataclass(frozen=True)
class Repeats:
    """Requests that were repeated; of these, those of equal tokens, and those whose first other token was a tie."""

    repeated: int = 0
    equal: int = 0
    ties: int = 0
    differing: tuple[str, ...] = ()


def repeat(
    generator: Generator,
    answers: Sequence[tuple[RandomRequest, list[int]]],
    tell: Callable[[int], None] = lambda _: None,
) -> Repeats:
    """Run each request again, alone; `tell` hears how many have. `generator` reuses no prefix. Raises whatever the
    executor raises."""
    equal = ties = 0
    differing = []
    for number, (one, answer) in enumerate(answers, 1):
        alone = [token for update in _run(generator, one.request) for token in update.token_ids]
        if alone == answer:
            equal += 1
        elif _is_tie(generator, one.request, answer, alone):
            ties += 1
        else:
            differing.append(one.request.request_id)
        tell(number)
    return Repeats(len(answers), equal, ties, tuple(differing))


def _run(generator: Generator, request: Request) -> list[Update]:
    generator.add(generator.prepare(request))
    updates: list[Update] = []
    while generator.has_work:
        updates += generator.step()
    return updates


def _is_tie(generator: Generator, request: Request, answer: Sequence[int], alone: Sequence[int]) -> bool:
    """Whether, where two answers part, the token of each is as probable as that of the other."""
    pairs = zip(answer, alone, strict=False)
    at = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if at is None:
        return False
    known = replace(request, params=replace(request.params, logprobs=2, max_tokens=at + 1))
    said = [logprobs for update in _run(generator, known) for logprobs in update.logprobs]
    if len(said) <= at:
        return False
    top = dict(said[at].top)
    return answer[at] in top and alone[at] in top and abs(top[answer[at]] - top[alone[at]]) < TIE_NATS
