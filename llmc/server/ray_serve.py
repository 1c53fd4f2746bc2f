"""`serve` over a Ray cluster: replicas of a bundle behind the proxy and router of Ray Serve (docs/ray.md).

A replica is the whole application over one opened bundle, and counts once it is warm. Serve queues, counts requests,
adds and takes away replicas, lets those that go finish, and replaces one that died.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llmc.cluster import AUTO, connected
from llmc.errors import DeviceError, InputError, LlmcError
from llmc.runtime.startup.opening import EngineOptions
from llmc.server.admission import check_age, check_model
from llmc.server.bell import bell
from llmc.server.connections import KEEP_ALIVE_S
from llmc.server.events import Draining, Event, Listening, Ready, Report, Stopped
from llmc.server.loading import OpenBundle, as_bundle, model_name
from llmc.server.ray_ingress import LOCAL, environment, why_not
from llmc.server.ray_replica import NAME, Replica, by_load

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle
    from llmc.server.state import ServerConfig
    from llmc.server.warming import WarmUp

_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_UNBOUNDED = 1 << 20
"""What Ray lets a replica answer at a time. Its engine bounds its own queue, and what needs no engine does not wait."""
_log = logging.getLogger("llmc")
_WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Fleet:
    """The cluster's `address` (None: on this host), how few and many replicas, the CPUs of each, how many requests each
    is to have, more wait for another, and for how many seconds load has to ask for more, or fewer, before they come or
    go."""

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
    warm_up: WarmUp | None = None, report: Report = lambda _: None,
) -> int:  # fmt: skip
    """Serve at `config.host`:`config.port` of the cluster's head until SIGTERM or SIGINT; the exit code.

    SIGHUP opens the bundle again and replaces replica by replica. The old bundle serves on where the new one cannot be
    opened, is not whole, is older or of another model, or where the only replica would have to go first. Raises
    DeviceError where the cluster cannot be reached or the replicas do not start, InputError for a port that is none or
    not the one that Serve has there, and for an admin token.
    """
    if not config.port:
        raise InputError("--port 0: a cluster listens on a port that is named; give one")
    if config.admin_tokens:
        raise InputError("--admin-token: a request would reach one replica of several; with --executor ray send SIGHUP")
    said, began = sys.stdout, time.monotonic()

    def tell(event: Event) -> None:
        with contextlib.redirect_stdout(said):
            report(event)

    with connected(fleet.address or AUTO) as ray:
        nodes = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    # Ray prints of replicas that die, and of its controller that ends
    with (
        contextlib.redirect_stdout(sys.stderr), connected(fleet.address or AUTO, environment(config.host, nodes)),
        bell(_WATCHED) as rung,
    ):  # fmt: skip
        bundle = _opened(open_bundle)
        deployment = _Deployment(bundle, config, open_bundle, fleet, options or EngineOptions(), warm_up)
        deployment.run()
        tell(Listening(f"http://{config.host}:{config.port}", not (config.api_keys or config.host in LOCAL)))
        tell(Ready(model_name(bundle), bundle.manifest.device, time.monotonic() - began, 0, 0))
        signals = (signum for signum in iter(lambda: rung.recv(1)[0], None) if signum in _WATCHED)
        while (signum := next(signals)) == signal.SIGHUP:
            deployment.swap()
        ended = time.monotonic()
        tell(Draining(signal.Signals(signum).name, 0, 0, config.shutdown_timeout_s))
        deployment.stop()
        tell(Stopped(0, time.monotonic() - ended))
    return 0


class _Deployment:
    """The application in the cluster, which serves `bundle`; a further generation replaces the one before."""

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
        self._check_place(config)
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
        self._options = ray_serve.deployment(ray_serve.ingress()(Replica)).options(
            name=NAME, **scaling, max_ongoing_requests=_UNBOUNDED,
            max_queued_requests=config.max_queued_requests, ray_actor_options={"num_cpus": fleet.cpus},
            graceful_shutdown_timeout_s=config.shutdown_timeout_s, graceful_shutdown_wait_loop_s=0.1,
            request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
        )  # fmt: skip
        # every client of a replica is the proxy
        alone = replace(config, max_connections=0, max_connections_per_client=0, max_requests_per_client=0)
        self._arguments = (alone, open_bundle, options, warm_up)

    def _check_place(self, config: ServerConfig) -> None:
        """Raise InputError where Serve ran in the cluster before, and listens elsewhere: it listens at one place."""
        from ray.serve.context import _get_global_client

        there = _get_global_client().http_config
        if (there.host, there.port) != (config.host, config.port):
            raise InputError(
                f"Serve runs in this cluster already, and listens at {there.host}:{there.port}, not at "
                f"{config.host}:{config.port}; give its --host and --port, or end it with `serve shutdown`"
            )

    def run(self) -> None:
        """Have replicas of this generation, all warm. Raises DeviceError."""
        try:
            self._serve.run(
                self._options.options(max_surge_percent=int(self._room)).bind(*self._arguments, self._generation),
                name=NAME, route_prefix="/", logging_config=self._logging,
            )  # fmt: skip
        except RuntimeError as e:
            raise DeviceError(f"the replicas did not start: {e}; `serve status` tells more") from e

    def swap(self) -> None:
        """Replace replica by replica, if the bundle may and can be served; where a node has room, the new one comes
        first."""
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
        """Raise LlmcError for another model, an older bundle, and one whose files are not what they were."""
        if not self._any_model:
            check_model(new, self._bundle)
        check_age(new, self._bundle, self._replaced)
        for digest in new.manifest.blobs:
            new.files.path(digest)

    @property
    def _room(self) -> bool:
        """Whether a node has room for one more replica."""
        from ray._private.state import available_resources_per_node

        return any(free.get("CPU", 0) >= self._cpus for free in available_resources_per_node().values())

    @property
    def _replicas(self) -> int:
        """Those that run."""
        states = self._serve.status().applications[NAME].deployments[NAME].replica_states
        return sum(count for state, count in states.items() if state == "RUNNING")

    def stop(self) -> None:
        """Let running requests end, and take the application away."""
        self._serve.delete(NAME)
        self._serve.shutdown()


def _opened(open_bundle: OpenBundle) -> Bundle:
    """Raises LlmcError."""
    return as_bundle(open_bundle(lambda _: None))
