"""What every family's model continues: ragged prompts, and transformers' greedy tokens after each alone."""

from __future__ import annotations

from functools import cache

from tests.compiler import tiny

NEW = 16
PROMPTS = ([5, 80, 3, 200, 17, 9, 9, 31, 4], [7], list(range(40, 58)))
"""One is longer than any window of a tiny configuration, the others cross it while they are continued."""


@cache
def continued(architecture: str) -> list[list[int]]:
    """16 greedy tokens for each prompt, by unbatched transformers without a cache."""
    return [tiny.greedy(architecture, prompt, NEW) for prompt in PROMPTS]
