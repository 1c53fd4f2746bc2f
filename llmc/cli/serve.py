"""`llmc serve`: an OpenAI-compatible server over a bundle."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmc.cli import output as messages
from llmc.cli.capturing import CaptureFlags, takes_capture_flags
from llmc.cli.grouped_help import add
from llmc.cli.openers import opener, reopener, require_there
from llmc.cli.options import (
    ENGINE,
    BundleOrModelArgument,
    EagerFlag,
    PrefillFlag,
    ThreadsFlag,
    WeightsFlag,
    device_option,
    option,
)
from llmc.cli.order import OrderFlag, uses_in
from llmc.cli.output import echo
from llmc.cli.quantities import duration, size
from llmc.cli.replicating import fleet, local_count, require_executor
from llmc.cli.speculation import ConfigJson, LookupMax, LookupMin, Speculate, asked
from llmc.compiler.options import LOCAL
from llmc.errors import InputError
from llmc.platforms import install_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from llmc.server.events import Event
    from llmc.server.state import Progress

_COMPILE, _OTHERS = "For a MODEL", "Other bundles"
_LIMITS, _LOGS, _RAY = "Clients", "Logs", "A Ray cluster"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    add(app, "serve", takes_capture_flags(serve_command))


def serve_command(
    bundle: BundleOrModelArgument,
    *,
    host: Annotated[str, option("--host", "H", "Address to listen on; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, option("--port", "P", "0 takes a free port and says which.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        option(
            "--api-key",
            "K",
            "Key that requests have to bring; may be repeated. Default: LLMC_API_KEY, which ps does not show.",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, option("--served-model-name", "NAME", "Default: the bundle's name of it.")
    ] = None,
    replicas: Annotated[
        str | None,
        option(
            "--replicas",
            "N|MIN-MAX",
            "Processes that share port, CPUs and weights; with ray, replicas there, of a range as load asks for. "
            "Default: 1.",
        ),
    ] = None,
    threads: ThreadsFlag = None,
    device: Annotated[str | None, device_option("--device", "What to compile for.")] = None,
    max_model_len: Annotated[int | None, option("--max-model-len", "N", "Tokens of one sequence.")] = None,
    max_num_seqs: Annotated[int | None, option("--max-num-seqs", "N", "Sequences in flight.")] = None,
    quantize: Annotated[str | None, option("--quantize", "none|int8|fp8|int4|keep", "Weights.")] = None,
    record_traffic: Annotated[
        Path | None, option("--record-traffic", "FILE", "Append lengths and times of requests, for llmc plan.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line when listening, ready, draining…")] = False,
    flags: CaptureFlags,
    uds: Annotated[
        Path | None,
        option("--uds", "PATH", "Listen on a Unix socket in place of host and port.", rich_help_panel=_LIMITS),
    ] = None,
    admin_token: Annotated[
        list[str] | None,
        option(
            "--admin-token",
            "T",
            "Token for POST /admin/bundle, which serves another bundle; may be repeated. Default: LLMC_ADMIN_TOKEN.",
            rich_help_panel=_OTHERS,
        ),
    ] = None,
    allow_model_change: Annotated[
        bool,
        typer.Option(
            "--allow-model-change", help="Let another bundle be of another model or tokenizer.", rich_help_panel=_OTHERS
        ),
    ] = False,
    weights: WeightsFlag = None,
    max_queued_requests: Annotated[
        int, option("--max-queued-requests", "N", "Waiting requests; more get a 503.", min=0, rich_help_panel=_LIMITS)
    ] = 64,
    shutdown_timeout: Annotated[
        str, option("--shutdown-timeout", "T", "Time that running requests get after SIGTERM.", rich_help_panel=_LIMITS)
    ] = "30s",
    max_body_size: Annotated[
        str, option("--max-body-size", "SIZE", "Largest request body.", rich_help_panel=_LIMITS)
    ] = "4MiB",
    max_connections: Annotated[
        int,
        option("--max-connections", "N", "Open connections; more get a 503. 0: any.", min=0, rich_help_panel=_LIMITS),
    ] = 1024,
    max_connections_per_client: Annotated[
        int,
        option(
            "--max-connections-per-client",
            "N",
            "Of one address; more get a 429. 0: any, as behind a proxy.",
            min=0,
            rich_help_panel=_LIMITS,
        ),
    ] = 256,
    max_requests_per_client: Annotated[
        int,
        option(
            "--max-requests-per-client",
            "N",
            "Answered at a time for one address; more get a 429. 0: any, as behind a proxy.",
            min=0,
            rich_help_panel=_LIMITS,
        ),
    ] = 128,
    prefill_budget: Annotated[
        int | None,
        option(
            "--prefill-budget", "N", "Prompt tokens between two decode steps at most.", min=1, rich_help_panel=ENGINE
        ),
    ] = None,
    prefix_slots: Annotated[
        int | None,
        option("--prefix-slots", "N", "Slots for prefixes beside a full batch.", min=0, rich_help_panel=ENGINE),
    ] = None,
    prefill: PrefillFlag = None,
    speculate: Speculate = None,
    prompt_lookup_max: LookupMax = None,
    prompt_lookup_min: LookupMin = None,
    speculative_config: ConfigJson = None,
    warm_up: Annotated[
        str | None,
        option(
            "--warm-up",
            "all|open|aside",
            "Before ready: run every bucket; or open all and run two; or run two, and the others between requests. "
            "Default: all (open: VLLM_SKIP_WARMUP).",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    traffic: OrderFlag = None,
    enforce_eager: EagerFlag = False,
    otlp_traces_endpoint: Annotated[
        str | None,
        option(
            "--otlp-traces-endpoint",
            "URL",
            "Send OpenTelemetry spans of requests to this receiver.",
            rich_help_panel=_LOGS,
        ),
    ] = None,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="Log each request on stderr.", rich_help_panel=_LOGS)
    ] = False,
    executor: Annotated[
        str,
        option("--executor", "local|ray", "Serve on this host, or by replicas of a Ray cluster.", rich_help_panel=_RAY),
    ] = LOCAL,
    address: Annotated[
        str | None,
        option(
            "--address",
            "HOST:PORT",
            "That cluster. Default: RAY_ADDRESS, or the one that runs on this host.",
            rich_help_panel=_RAY,
        ),
    ] = None,
    target_requests: Annotated[
        int | None,
        option("--target-requests", "N", "Requests a replica is to have. Default: 8.", min=1, rich_help_panel=_RAY),
    ] = None,
    scale_up_after: Annotated[
        str | None,
        option(
            "--scale-up-after",
            "T",
            "Load asks for that long before a replica comes. Default: 30s.",
            rich_help_panel=_RAY,
        ),
    ] = None,
    scale_down_after: Annotated[
        str | None, option("--scale-down-after", "T", "And so before one goes. Default: 10m.", rich_help_panel=_RAY)
    ] = None,
    dtype: Annotated[
        str | None, option("--dtype", "auto|f32|bf16|f16", "Unquantised numbers.", rich_help_panel=_COMPILE)
    ] = None,
    plan: Annotated[
        Path | None, option("--plan", "PLAN", "A plan file of llmc plan -o.", rich_help_panel=_COMPILE)
    ] = None,
) -> None:
    """Serve a bundle with OpenAI's API. Compiles nothing while it serves, and needs neither torch nor transformers.

    /health answers from the start, /ready once every graph is open and has run. SIGTERM or Ctrl-C lets running
    requests end first; a second one cuts them. Also at /metrics, /dashboard and /openapi.json.

    SIGHUP serves what BUNDLE is by then, a link or a tag that moved, and POST /admin/bundle any bundle: no request is
    lost, and one that does not work is refused.

    \b
    Example:
      llmc serve bundle --port 8000
      llmc serve current --admin-token "$TOKEN"    # later: ln -sfn bundle-2 current; kill -HUP PID
      llmc serve bundle --host 0.0.0.0 --api-key "$KEY" --record-traffic traffic.jsonl --json
      llmc serve bundle --replicas 2
      llmc serve ./SmolLM2-135M-Instruct --quantize int8 --max-model-len 2048 --max-num-seqs 4
    """
    from llmc.runtime.startup.opening import EngineOptions
    from llmc.server.state import ServerConfig
    from llmc.settings import Settings

    settings = Settings.from_environment()
    config = ServerConfig(
        host, port, _keys("--api-key", api_key, settings.api_key), max_queued_requests,
        duration("--shutdown-timeout", shutdown_timeout) or 0, size("--max-body-size", max_body_size) or 0,
        served_model_name, record_traffic, otlp_traces_endpoint, max_connections,
        max_connections_per_client, max_requests_per_client,
        admin_tokens=_keys("--admin-token", admin_token, settings.admin_token), allow_model_change=allow_model_change,
    )  # fmt: skip
    wanted = {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs, "quantize": quantize, "dtype": dtype}
    options: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
    if plan is not None:
        options["plan"] = _plan(plan, options)
    chosen: dict[str, Any] = {"threads": threads, "prefill_budget": prefill_budget, "prefix_slots": prefix_slots}
    chosen |= {"prefill": prefill, "enforce_eager": enforce_eager}
    chosen["speculative_config"] = asked(speculate, prompt_lookup_max, prompt_lookup_min, speculative_config)
    run = EngineOptions(**{name: value for name, value in chosen.items() if value is not None})
    scaling = {"--target-requests": target_requests, "--scale-up-after": scale_up_after}
    scaling["--scale-down-after"] = scale_down_after
    cluster = {"--address": address, **scaling}
    alone = {
        "--uds": uds, "--record-traffic": record_traffic, "--otlp-traces-endpoint": otlp_traces_endpoint,
        "--access-log": access_log or None,
    }  # fmt: skip
    require_executor(executor, cluster, alone)
    serve = _server(local_count(replicas) if executor == LOCAL else 1)
    from llmc.artifacts.local.opening import open_store
    from llmc.server.warming import WarmUp, how_of

    store = open_store(None, settings, device)
    how = how_of(warm_up or ("open" if settings.skip_warmup else "all"))
    warming = WarmUp(how, None if traffic is None else uses_in(traffic), flags.choice(settings))
    open_bundle = opener(bundle, device, options, store, weights, as_json)
    with _JsonEvents() if as_json else _Told() as report:
        if executor != LOCAL:
            from llmc.server.ray_serve import serve as serve_over_ray

            replicated = fleet(address or settings.ray_address, replicas, threads or settings.threads, scaling)
            require_there(bundle, device, settings, store)
            raise typer.Exit(
                serve_over_ray(config, open_bundle, replicated, options=run, warm_up=warming, report=report)
            )
        code = serve(
            config,
            open_bundle,
            options=run,
            warm_up=warming,
            report=report,
            uds=uds,
            access_log=access_log,
            cache_counters=lambda: store.counters,
            reopen=reopener(bundle, device, options, store, weights),
        )
    raise typer.Exit(code)


def _server(replicas: int) -> Callable[..., int]:
    try:
        from llmc.server.serve import serve

        if replicas > 1:
            from llmc.server.replicas.serving import serve_replicas

            return partial(serve_replicas, replicas)
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] == "llmc":
            raise
        raise InputError(f"llmc serve needs {e.name}, which is not installed: {install_line('serve')}") from e
    return serve


def _keys(flag: str, given: list[str] | None, default: str | None) -> tuple[str, ...]:
    if given is None:
        return () if default is None else (default,)
    if not all(key.strip() for key in given):
        raise InputError(f"{flag} is empty; leave it out to ask for none (is the variable that it comes from set?)")
    return tuple(given)


def _plan(file: Path, options: dict[str, Any]) -> Any:
    from llmc.buckets.plan import Plan

    for name in ("max_model_len", "max_num_seqs"):
        if name in options:
            raise InputError(f"--plan has the limits already; leave out --{name.replace('_', '-')}")
    return Plan.load(file)


class _JsonEvents:
    """One JSON line an event on standard output; progress is asked for at /ready."""

    def __enter__(self) -> _JsonEvents:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        return None

    def __call__(self, event: Event) -> None:
        from llmc.server.state import Progress

        if not isinstance(event, Progress):
            line = {"event": type(event).__name__.lower(), **asdict(event)}
            echo(json.dumps(line))


class _Told:
    """Lines for a person on standard error, with a bar while loading; nothing when quiet."""

    EVERY_S = 5.0

    def __init__(self) -> None:
        self._bars: dict[str, messages.StepProgress] = {}
        self._said_at = time.monotonic()

    def __enter__(self) -> _Told:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._close_bars()

    def __call__(self, event: Event) -> None:
        from llmc.server.events import (
            Dead,
            Draining,
            Listening,
            Ready,
            ReplicaBack,
            ReplicaLost,
            Retired,
            Stopped,
            Swapped,
            SwapRefused,
            WarmAside,
        )

        if messages.quiet:
            return
        match event:
            case Listening(url=url):
                self._say(f"listening on {url}")
                if event.open_to_all:
                    self._say("no API key is asked for, and other hosts can connect: --api-key sets one")
            case Ready():
                self._close_bars()
                self._say(
                    f"ready in {event.seconds:.1f} s: {event.model} on {event.device}; {event.warmed} steps run to "
                    f"warm up, compilations {event.compilations}"
                )
            case WarmAside(failed=failed):
                named = f"; failed: {', '.join(failed)}" if failed else ""
                self._say(
                    f"warm: {event.warmed} more buckets run between requests in {event.seconds:.1f} s, compilations "
                    f"{event.compilations}{named}"
                )
            case Swapped(changed=False):
                self._say(f"{event.digest[:19]} is served already; nothing changed")
            case Swapped():
                self._say(
                    f"new requests run on {event.digest[:19]} after {event.seconds:.1f} s, {event.draining} still on "
                    f"{event.previous[:19]}"
                )
            case SwapRefused():
                self._say(f"the other bundle is refused, what was served is served: {event.message}")
            case Retired():
                self._say(f"{event.digest[:19]} is closed, {event.seconds:.1f} s after")
            case Draining():
                self._close_bars()
                self._say(
                    f"{event.signal}: no new requests; {event.running} running and {event.waiting} waiting may take "
                    f"{event.timeout_s:g} s (again: stop now)"
                )
            case ReplicaLost(replica=number):
                self._say(f"replica {number} ended: {event.reason}; another starts in {event.again_s:g} s")
            case ReplicaBack(replica=number):
                self._say(f"replica {number} serves, {event.seconds:.1f} s after its start")
            case Dead():
                self._say(f"the engine stopped, /health is 503 now: {event.message}")
            case Stopped():
                cut = f", {event.cancelled} requests cut" if event.cancelled else ""
                self._say(f"stopped after {event.seconds:.1f} s{cut}")
            case _:
                self._progress(event)

    def _progress(self, at: Progress) -> None:
        from llmc.server.warming import STAGE

        if at.stage != STAGE:  # a compile shows itself
            return
        if sys.stderr.isatty():
            if at.stage not in self._bars:
                self._close_bars()
                self._bars[at.stage] = messages.StepProgress(at.stage)
                self._bars[at.stage].__enter__()
            self._bars[at.stage]("", at.done, at.total)
        elif time.monotonic() - self._said_at > self.EVERY_S:
            self._said_at = time.monotonic()
            left = "" if at.eta_s is None else f", about {at.eta_s:.0f} s left"
            self._say(f"{at.stage}: {at.done} of {at.total}{left}")

    def _close_bars(self) -> None:
        for bar in self._bars.values():
            bar.__exit__(None, None, None)
        self._bars.clear()

    def _say(self, text: str) -> None:
        echo(f"llmc: {text}", err=True)
