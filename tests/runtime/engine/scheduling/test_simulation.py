"""Every promise of scheduling/base.py, watched over random traffic; see watched.py for what is checked."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from llmc.runtime.engine.scheduling.base import SchedulerConfig
from tests.runtime.engine.scheduling.plans import plans
from tests.runtime.engine.scheduling.simulation import rounds
from tests.runtime.engine.scheduling.watched import Watched
from tests.tiers import default_cases, examples


@default_cases(1)
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_keeps_every_promise(seed: int) -> None:
    totals: Counter[str] = Counter()
    for _, counts in rounds(seed, steps=15_000):
        totals += counts
    # the traffic met what the promises are about
    assert totals["prefix hits"] > 500
    assert totals["copies"] > 500
    assert totals["shared prompt steps"] > 100
    assert totals["held up"] > 0
    assert totals["mixed steps"] > 500
    assert totals["held"] > 500 < totals["drafted"] - totals["held"]
    assert totals["cuts"] > 500
    assert min(totals["waited for the pool"], totals["waited for a beginning"]) > 50


class AnyUse(RuleBasedStateMachine):
    """Adds, cancels and steps in any order, so that a failure shrinks to the few that matter."""

    @initialize(
        plan=st.sampled_from(["toy", "steep", "one", "narrow"]),
        extra=st.integers(0, 2),
        exact=st.booleans(),
        budget=st.sampled_from([1, 8, 64]),
        min_prefix=st.sampled_from([0, 1, 4]),
        overtake=st.sampled_from([0, 2]),
        ragged=st.booleans(),
        pool=st.sampled_from([None, 1, 3]),
        drafts=st.sampled_from([0, 3]),
    )
    def open(
        self, plan: str, extra: int, exact: bool, budget: int, min_prefix: int, overtake: int, ragged: bool,
        pool: int | None, drafts: int,
    ) -> None:  # fmt: skip
        chosen = plans()[plan]
        live = chosen.limits.max_num_seqs
        config = SchedulerConfig(
            live, live + extra, exact=exact or ragged, prefill_budget=budget, min_prefix=min_prefix, overtake=overtake,
            ragged=ragged, block_tokens=4,
            cache_tokens=pool * (chosen.limits.max_model_len + 3) if ragged and pool else None,
        )  # fmt: skip
        self.watched = Watched(chosen, config, lambda tokens: len(tokens) % 2, drafts=drafts)
        self.sent = 0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=40),
        count=st.sampled_from([1, 1, 3]),
        priority=st.integers(-1, 1),
        budget=st.sampled_from([None, 1, 5]),
    )
    def add(self, prompt: list[int], count: int, priority: int, budget: int | None) -> None:
        first = self.sent
        for _ in range(count):
            prompt = prompt[: self.watched.plan.limits.longest_prompt]
            self.watched.add(self.sent, prompt, priority, first if count > 1 else None, budget)
            self.sent += 1

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.watched.clients:
            self.watched.cancel(data.draw(st.sampled_from(sorted(self.watched.clients))))

    @precondition(lambda self: self.watched.clients)
    @rule(count=st.integers(1, 6), modulus=st.integers(2, 5), cancels=st.booleans())
    def step(self, count: int, modulus: int, cancels: bool) -> None:
        def meanwhile() -> None:
            if cancels and self.watched.clients:
                self.watched.cancel(max(self.watched.clients))

        for _ in range(count):
            self.watched.step(lambda client: len(client.tokens) % modulus == 0, meanwhile)

    def teardown(self) -> None:
        self.watched.drain()
        self.watched.check_idle()


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = examples(60, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow])
