"""Random traffic through watched schedulers of many configurations.

    python -m tests.runtime.engine.scheduling.simulation --steps 2000000 --seed 0

prints a line now and then and figures at the end; a failure names the seed of its round.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from random import Random

import numpy as np

from llmc.buckets.plan import Plan
from llmc.runtime.engine.scheduling.base import SchedulerConfig
from tests.runtime.engine.scheduling.plans import plans
from tests.runtime.engine.scheduling.watched import Client, Watched


def random_config(random: Random, plan: Plan) -> SchedulerConfig:
    """Any valid configuration, the tight ones often."""
    most = plan.limits.max_num_seqs
    live = random.choice([most, most, random.randint(1, most)])
    ragged = random.random() < 0.4
    block = random.choice([1, 4, 16])
    pool = random.choice([None, *(plan.limits.max_model_len + block) * np.array([1, 2, 4])])
    return SchedulerConfig(
        max_num_seqs=live,
        slots=live + random.choice([0, 0, 1, 1, 2, 4, 8]),
        exact=ragged or random.random() < 0.4,
        ragged=ragged,
        cache_tokens=int(pool) if ragged and pool is not None else None,
        block_tokens=block,
        prompt_chunk=random.choice([None, 8, 32]),
        prefill_budget=random.choice([1, 4, 16, 64, 512]),
        min_prefix=random.choice([0, 1, 4, 16]),
        overtake=random.choice([0, 1, 5, 64]),
    )


class Traffic:
    """Senders: conversations that go on, shared beginnings, several answers to one prompt, changes of mind."""

    def __init__(self, watched: Watched, random: Random) -> None:
        self.watched, self.random = watched, random
        self.load = random.choice([0.02, 0.1, 0.3, 0.8])
        self.cancels = random.choice([0.0, 0.01, 0.1])
        self.ends = random.choice([0.02, 0.1, 0.5])
        self.priorities = random.choice([1, 1, 4])
        self.next_id = 0
        longest = watched.plan.limits.longest_prompt
        self.beginnings = [self._tokens(longest) or [0] for _ in range(3)]

    def act(self) -> None:
        """What happens between two calls of the scheduler."""
        if len(self.watched.clients) < 24 and self.random.random() < self.load:
            self.send()
        if self.watched.clients and self.random.random() < self.cancels:
            self.watched.cancel(self.random.choice(list(self.watched.clients)))

    def send(self) -> None:
        """Add a sequence, or a few of one group."""
        prompt = self._prompt()
        count = self.random.choice([1, 1, 1, 1, 2, 4])
        group = self.next_id if count > 1 else None
        priority = self.random.randrange(self.priorities) - self.priorities // 2
        budget = self.random.choice([None, self.random.randint(1, 20)])
        for _ in range(count):
            self.watched.add(self.next_id, prompt, priority, group, budget)
            self.next_id += 1

    def finish(self, client: Client) -> bool:
        del client
        return self.random.random() < self.ends

    def _prompt(self) -> list[int]:
        random, longest = self.random, self.watched.plan.limits.longest_prompt
        kind = random.random()
        if kind < 0.3 and self.watched.ended:
            last = list(self.watched.ended)[-8:]
            start = self.watched.ended[random.choice(last)]
        elif kind < 0.8:
            beginning = random.choice(self.beginnings)
            start = beginning[: random.randint(1, len(beginning))]
        else:
            start = []
        tokens = (start + self._tokens(random.choice([0, 1, 3, longest // 4, longest])))[:longest]
        return tokens or [0]

    def _tokens(self, most: int) -> list[int]:
        return [self.random.randrange(3) for _ in range(self.random.randint(0, most))]


def play(watched: Watched, random: Random, steps: int) -> None:
    """`steps` scheduler steps of random traffic, then drain to idle."""
    traffic = Traffic(watched, random)
    for _ in range(steps):
        traffic.act()
        meanwhile = traffic.act if random.random() < 0.2 else lambda: None
        if watched.step(traffic.finish, meanwhile) is None:
            traffic.send()
        if len(watched.ended) > 64:
            watched.ended = dict(list(watched.ended.items())[-8:])
    watched.drain(traffic.finish)


def rounds(seed: int, steps: int, each: int = 400) -> Iterator[tuple[str, Counter[str]]]:
    """Play rounds of `each` steps until there were `steps`, each with a plan and configuration of its own."""
    done, number = 0, 0
    names = list(plans())
    while done < steps:
        random = Random(f"{seed}-{number}")
        name = names[number % len(names)]
        plan = plans()[name]
        config = random_config(random, plan)
        drafts, wrong = random.choice([0, 0, 1, 4, 9]), random.choice([2, 5, 1000])
        watched = Watched(plan, config, lambda tokens: (len(tokens) * 7 + tokens[-1]) % 3, drafts=drafts, wrong=wrong)
        try:
            play(watched, random, each)
        except Exception as error:
            raise AssertionError(f"seed {seed}, round {number}, plan {name}, {config}: {error}") from error
        done += watched.steps
        number += 1
        watched.counts["steps"] = watched.steps
        kind = "tight" if config.slots == config.max_num_seqs else "roomy"
        yield ("pooled" if config.cache_tokens else "ragged" if config.ragged else kind), watched.counts


def report(counts: Counter[str]) -> str:
    """Figures of many steps."""
    admitted = max(counts["admitted"], 1)
    return (
        f"{counts['steps']:,} steps, {counts['admitted']:,} sequences, {counts['tokens']:,} tokens; per sequence "
        f"{counts['copies'] / admitted:.2f} copies of {counts['copied tokens'] / max(counts['copies'], 1):.1f} tokens; "
        f"{counts['saved tokens'] / max(counts['prompt tokens'], 1):.1%} of prompt tokens from prefixes, "
        f"{counts['prefix hits'] / admitted:.1%} of prompts; "
        f"{counts['shared prompt steps'] / max(counts['prompt steps'], 1):.1%} of prompt steps shared; "
        f"{counts['computed again']:,} tokens computed again; {counts['held up']:,} rows held up; "
        f"{counts['mixed steps'] / max(counts['steps'], 1):.1%} of steps mixed; "
        f"{counts['held'] / max(counts['drafted'], 1):.1%} of {counts['drafted']:,} drafted tokens held"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2_000_000)
    parser.add_argument("--seed", type=int, default=0)
    requested = parser.parse_args()
    totals: dict[str, Counter[str]] = {kind: Counter() for kind in ("roomy", "tight", "ragged", "pooled")}
    started = last = time.perf_counter()
    for kind, counts in rounds(requested.seed, requested.steps):
        totals[kind] += counts
        if time.perf_counter() - last > 20:
            last = time.perf_counter()
            print(f"{last - started:.0f} s: {sum(total['steps'] for total in totals.values()):,} steps", flush=True)
    for kind, total in totals.items():
        print(f"{kind}: {report(total)}")
    print(f"{time.perf_counter() - started:.0f} s, no failure")


if __name__ == "__main__":
    main()
