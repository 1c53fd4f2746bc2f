"""Every mechanism as portable programs, which each device with static shapes starts from: one trace, two sizes."""

from __future__ import annotations

from tests.compiler.replay import Replay, two_part_run
from tests.models.texts import NEW, PROMPTS, continued
from tests.tiers import default_cases

QUERY, CONTEXT = 6, 40
DUMMY = [0]
"""A row of padding alone."""


@default_cases("llama")
def test_logits_of_ragged_nan_filled_batches_and_greedy_tokens_are_transformers_own(mechanism: str) -> None:
    """Prompts in chunks, then a token at a time, each row at its own pace; the last row is a dummy throughout."""
    texts = [prompt + more for prompt, more in zip(PROMPTS, continued(mechanism), strict=True)]
    rows = Replay(mechanism, two_part_run(mechanism), [*texts, DUMMY], capacity=CONTEXT, in_place=False)
    while any(left := [len(p) - past for p, past in zip(PROMPTS, rows.past, strict=False)]):
        counts = [max(0, min(QUERY, n)) for n in left]
        assert max(rows.step((*counts, 0), CONTEXT, QUERY)) < 1e-4
    for _ in range(NEW - 1):
        assert max(rows.step((1, 1, 1, 0), CONTEXT)) < 1e-4
    assert [best[-NEW:] for best in rows.best[:-1]] == continued(mechanism)
