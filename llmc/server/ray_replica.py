"""One of several replicas of a bundle, as Ray Serve runs it."""

from __future__ import annotations

import math
import threading
from functools import cached_property
from typing import TYPE_CHECKING, Any

from llmc.server.backend import Backend
from llmc.server.lifecycle import ENGINE_STOP_S
from llmc.server.telemetry.replicas import SCRAPE_S, together

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prometheus_client import Metric

    from llmc.runtime.startup.opening import EngineOptions
    from llmc.server.loading import OpenBundle
    from llmc.server.state import ServerConfig
    from llmc.server.warming import WarmUp

NAME = "llmc"
"""Of the application in the cluster, and of its one deployment."""
FULL = 0.8
"""Share of the cache's tokens from which more replicas are wanted."""


class Replica:
    """One copy of the bundle, opened and warm. Raises what loading raises."""

    def __init__(
        self, config: ServerConfig, open_bundle: OpenBundle, options: EngineOptions, warm_up: WarmUp | None,
        generation: int,
    ) -> None:  # fmt: skip
        from ray import serve

        del generation  # a further one makes Serve replace the replicas
        self._name = serve.get_replica_context().replica_tag
        self._backend = Backend(config, open_bundle, options, warm_up=warm_up)
        self._backend.state.all_metrics = self._all_metrics
        self._backend.load()
        if self._backend.state.load_error is not None:
            raise self._backend.state.load_error
        threading.Thread(target=self._backend.prepare, daemon=True).start()

    def __serve_build_asgi_app__(self) -> Any:
        """What Serve runs."""
        return self._backend.app

    def check_health(self) -> None:
        """Raises where the engine died: Serve replaces the replica."""
        if self._backend.state.phase == "dead":
            raise RuntimeError("the engine stopped on an error")

    def record_autoscaling_stats(self) -> Mapping[str, float]:
        """The share of the cache's tokens in use."""
        served = self._backend.state.served
        return {"tokens": 0.0 if served is None or served.pooler else served.engine.stats.kv_cache_usage}

    def metrics(self) -> Sequence[Metric]:
        """This replica's."""
        return self._backend.state.metrics_as(self._name)

    @cached_property
    def _replicas(self) -> Any:
        """A handle, which follows them as they come and go."""
        from ray import serve

        return serve.get_deployment_handle(NAME, NAME)

    async def _all_metrics(self) -> Sequence[Metric]:
        """Of all replicas; where one takes longer than SCRAPE_S, of this one alone."""
        try:
            told = self._replicas.broadcast("metrics")
            answers = await told.results_async(timeout_s=SCRAPE_S, return_exceptions=True)
        except TimeoutError:
            return self.metrics()
        return together(answer for answer in answers if not isinstance(answer, BaseException))

    def __del__(self) -> None:
        served = self._backend.state.served
        if served is not None:
            served.close(ENGINE_STOP_S)


def by_load(context: Any) -> tuple[int, dict[str, Any]]:
    """How many replicas there are to be: as many as the requests, running and queued, and the tokens ask for."""
    tokens = context.aggregated_metrics.get("tokens", {}).values()
    requests = context.total_num_requests / context.config.target_ongoing_requests
    wanted = math.ceil(max(requests, sum(tokens) / FULL))
    return min(max(wanted, context.capacity_adjusted_min_replicas), context.capacity_adjusted_max_replicas), {}
