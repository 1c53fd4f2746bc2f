"""What was verified of a bundle, and its accuracy, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def verified_line(verification: Mapping[str, Any], executables: int) -> str:
    """One line about what was run against the reference, of how many executables, and what came of it."""
    v = verification
    ran, buckets, left_out = v["executables"], v["buckets"], v["left_out"]
    run = f"{'all ' * (ran > 1)}{ran}" if ran == executables else f"{ran} of {executables}"
    of = "" if buckets == v["planned"] else f" of {v['planned']}"
    poisons = f"{v['twice']} under two poisons"
    if left_out:
        poisons += f", {len(left_out)} sampled ones under one to keep within the budget: {', '.join(left_out)}"
    return (
        f"against {v['reference']}: {run} executable{'s' * (executables > 1)} run, {buckets}{of} buckets ({poisons}), "
        f"{v['rows']} rows of up to {v['longest']} tokens: mean KL {v['mean_kl']:.2g} (limit "
        f"{v['limits']['mean_kl']:.2g}), equal tokens {v['top1']:.1%}, greedy texts equal "
        f"{v['greedy_equal']}/{v['greedy_sequences']}, padding leak {v['leak']:.2g}"
    )


def accuracy_line(verification: Mapping[str, Any]) -> str:
    """One line about a verification's accuracy over the text, with the limit that it kept."""
    found, limits = verification["accuracy"], verification["limits"]
    return (
        f"accuracy over {found['tokens']} tokens of text: mean KL {found['mean_kl']:.2g} nats (limit "
        f"{limits['mean_kl']:.2g} for {limits['quality']}), p99 {found['p99_kl']:.2g}, equal tokens {found['top1']:.1%}"
    )
