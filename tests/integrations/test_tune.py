"""From steps to lists within a budget, by any server's rules."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from llmc.errors import InputError
from llmc.integrations import bucket_rules
from llmc.integrations.base import GraphCost, GraphDemand, Setup, Shape
from llmc.integrations.settings import complete
from llmc.integrations.tune import ServerBudget, tune
from tests.integrations.fake import Fake

counts = st.dictionaries(st.integers(1, 64), st.integers(1, 50), min_size=1, max_size=12)


def demands(tokens: dict[int, int]) -> dict[str, dict[tuple[int, ...], GraphDemand]]:
    return {
        "tokens": {(n,): GraphDemand("tokens", (n,), steps, n * steps) for n, steps in tokens.items()},
        "decode": {(n,): GraphDemand("decode", (n,), steps, n * steps) for n, steps in tokens.items() if n <= 8},
    }


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts)
def test_as_many_graphs_as_the_servers_own_pad_no_more(fake: Fake, setup: Setup, tokens: dict[int, int]) -> None:
    tuned = tune(fake, setup, demands(tokens), ServerBudget())
    assert tuned.chosen.graphs <= tuned.default.graphs
    for name in ("tokens", "decode"):
        assert tuned.chosen.family(name).padded <= tuned.default.family(name).padded
    assert tuned.chosen.missing == 0


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts, st.integers(1, 28))
def test_a_budget_is_kept(fake: Fake, setup: Setup, tokens: dict[int, int], most: int) -> None:
    assert tune(fake, setup, demands(tokens), ServerBudget(graphs=most)).chosen.graphs <= most


@pytest.mark.parametrize(("name", "most"), [("optimum-rbln", 3), ("optimum-rbln", 6), ("vllm", 21), ("sglang", 14)])
def test_a_budget_is_used_up_and_a_family_has_what_it_needs(name: str, most: int) -> None:
    server = bucket_rules(name)
    limits = server.limits({"max_model_len": 8192, "max_num_seqs": 64, "max_num_batched_tokens": 8192})
    limited = Setup(limits, complete(server.settings, {}))
    tokens: dict[Shape, GraphDemand] = {(n,): GraphDemand("", (n,), 65 - n, n) for n in range(1, 65)}
    tuned = tune(server, limited, {family.name: tokens for family in server.families}, ServerBudget(graphs=most))
    assert tuned.chosen.graphs == most


def test_times_and_sizes_are_graphs_by_what_one_takes() -> None:
    cost = GraphCost(2.0, 1 << 20, "here")
    assert ServerBudget(9, 14.0, 5 << 20).most(cost) == 5
    assert ServerBudget().most(cost) is None
    with pytest.raises(InputError, match=r"graph memory needs what one graph takes \(here\): give --graph-bytes"):
        ServerBudget(graph_bytes=5).most(GraphCost(2.0, None, "here"))
    with pytest.raises(InputError, match="allows no graph"):
        ServerBudget(warmup_seconds=1.0).most(cost)
