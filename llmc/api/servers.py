"""Plans for other servers: the Python form of `llmc plan tune|evaluate|export --server`.

With this module as `servers`:

    tuned = servers.tune("vllm", "requests.csv", max_model_len=8192, max_num_seqs=128)
    tuned.default.padding, tuned.chosen.padding
    servers.export(tuned.plan).arguments
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.integrations.base import Export
    from llmc.integrations.evaluation import ServerEvaluation
    from llmc.integrations.plan import ServerPlan
    from llmc.integrations.settings import Value
    from llmc.integrations.tune import Tuned

Named = str | os.PathLike[str]


def tune(
    server: str, traffic: Named, *, settings: Mapping[str, Value] | None = None, clip: bool = False,
    arrival_rate: float | None = None, max_graphs: int | None = None, max_warmup: float | None = None,
    max_graph_memory: int | None = None, hedge: float | None = None, **limits: int,
) -> Tuned:  # fmt: skip
    """Choose the lists of `server` that pad the requests in `traffic` least; the result also has its default lists.

    `server` may name a release: "vllm@0.24". `limits` are max_model_len and, where they differ from the server's
    defaults, max_num_seqs, max_num_batched_tokens and block_size. `settings` are server-specific, by name. `max_warmup`
    is in seconds, `max_graph_memory` in bytes; without a bound there are as many graphs as by default. `hedge` is the
    weight of shifted traffic in the plan, 0 to below 1, by default chosen (llmc.integrations.tune). Raises
    InputError for unusable input, UnknownNameError for an unknown server.
    """
    from llmc.integrations import bucket_rules, released
    from llmc.integrations.configuration import setup_for
    from llmc.integrations.observed import TrafficSource, observe
    from llmc.integrations.tune import ServerBudget, tune_on

    name, release = released(server)
    model = bucket_rules(name)
    setup = setup_for(model, limits, {**release, **(settings or {})})
    source = TrafficSource(os.fspath(traffic), arrival_rate, clip)
    observed = observe(model, setup, source)
    budget = ServerBudget(max_graphs, max_warmup, max_graph_memory)
    return tune_on(model, setup, source, observed, budget, hedge=hedge)


def load(
    server: str, source: Named, *, settings: Mapping[str, Value] | None = None, **limits: int
) -> ServerPlan:  # fmt: skip
    """Read the configuration at `source` by the rules of `server`: a folder, file, command line, plan or log.

    `limits` and `settings` are as in `tune`, for values that the source does not state. Raises what `tune` raises, and
    InputError for what the server refuses.
    """
    from llmc.integrations import bucket_rules, released
    from llmc.integrations.configuration import load as read
    from llmc.integrations.plan import ServerPlan

    name, release = released(server)
    model = bucket_rules(name)
    loaded = read(model, os.fspath(source), limits, {**release, **(settings or {})})
    return ServerPlan(model.name, loaded.setup, loaded.accepted(model).lists, f"read from {Path(source).name}")


def evaluate(
    plan: ServerPlan, traffic: Named, *, clip: bool = False, arrival_rate: float | None = None
) -> ServerEvaluation:
    """Evaluate `plan` on `traffic` by its server's rules. Raises InputError if the traffic cannot be read."""
    from llmc.integrations.evaluation import evaluate as judge
    from llmc.integrations.observed import TrafficSource, observe

    model = plan.model()
    observed = observe(model, plan.setup, TrafficSource(os.fspath(traffic), arrival_rate, clip))
    return judge(model, plan.setup, plan.lists, observed.demands)


def export(plan: ServerPlan) -> Export:
    """Export `plan` in its server's format: variables, flags and files by name."""
    return plan.model().export(plan.setup, plan.lists)
