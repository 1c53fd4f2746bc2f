"""`llmc serve`: an OpenAI-compatible server over a bundle."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmc.cli import output as messages
from llmc.cli.capturing import CaptureFlags
from llmc.cli.options import (
    DTYPE_CHOICES,
    ENGINE,
    SPECULATION,
    address_flag,
    bundle_or_model_argument,
    device_flag,
    eager_flag,
    executor_flag,
    flag,
    order_flag,
    plan_flag,
    prefill_flag,
    prompt_lookup_max_flag,
    prompt_lookup_min_flag,
    quantize_flag,
    speculate_flag,
    speculation,
    switch,
    threads_flag,
    weights_flag,
)
from llmc.cli.output import echo
from llmc.cli.planning import uses_in
from llmc.cli.quantities import duration, size
from llmc.compiler.options import EXECUTORS, LOCAL
from llmc.errors import InputError, UnknownNameError
from llmc.platforms import install_line
from llmc.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmc.runtime.startup.opening import EngineOptions
    from llmc.server.events import Event
    from llmc.server.ray_serve import Fleet
    from llmc.server.state import Progress, ServerConfig


_COMPILE, _OTHERS = "For a MODEL", "Other bundles"
_LIMITS, _LOGS, _RAY = "Clients", "Logs", "A Ray cluster"


@dataclass(frozen=True, kw_only=True)
class ServeCommand(CaptureFlags):
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

    brief = True

    bundle: str = bundle_or_model_argument()
    host: str = flag("127.0.0.1", "H", "Address to listen on; 0.0.0.0: all.")
    port: int = flag(8000, "P", "0 takes a free port and says which.")
    api_key: list[str] | None = flag(
        None, "K", "Key that requests have to bring; may be repeated. Default: LLMC_API_KEY, which ps does not show."
    )
    served_model_name: str | None = flag(None, "NAME", "Default: the bundle's name of it.")
    replicas: str | None = flag(
        None,
        "N|MIN-MAX",
        "Processes that share port, CPUs and weights; with ray, replicas there, of a range as load asks for. "
        "Default: 1.",
    )
    threads: int | None = threads_flag()
    device: str | None = device_flag(None, "What to compile for.")
    max_model_len: int | None = flag(None, "N", "Tokens of one sequence.")
    max_num_seqs: int | None = flag(None, "N", "Sequences in flight.")
    quantize: str | None = quantize_flag("Weights.")
    record_traffic: Path | None = flag(None, "FILE", "Append lengths and times of requests, for llmc plan.")
    as_json: bool = switch("--json", "Print a JSON line when listening, ready, draining…")
    uds: Path | None = flag(None, "PATH", "Listen on a Unix socket in place of host and port.", _LIMITS)
    admin_token: list[str] | None = flag(
        None,
        "T",
        "Token for POST /admin/bundle, which serves another bundle; may be repeated. Default: LLMC_ADMIN_TOKEN.",
        _OTHERS,
    )
    allow_model_change: bool = switch(
        "--allow-model-change", "Let another bundle be of another model or tokenizer.", _OTHERS
    )
    weights: str | None = weights_flag()
    max_queued_requests: int = flag(64, "N", "Waiting requests; more get a 503.", _LIMITS, min=0)
    shutdown_timeout: str = flag("30s", "T", "Time that running requests get after SIGTERM.", _LIMITS)
    max_body_size: str = flag("4MiB", "SIZE", "Largest request body.", _LIMITS)
    max_connections: int = flag(1024, "N", "Open connections; more get a 503. 0: any.", _LIMITS, min=0)
    max_connections_per_client: int = flag(
        256, "N", "Of one address; more get a 429. 0: any, as behind a proxy.", _LIMITS, min=0
    )
    max_requests_per_client: int = flag(
        128, "N", "Answered at a time for one address; more get a 429. 0: any, as behind a proxy.", _LIMITS, min=0
    )
    prefill_budget: int | None = flag(None, "N", "Prompt tokens between two decode steps at most.", ENGINE, min=1)
    prefix_slots: int | None = flag(None, "N", "Slots for prefixes beside a full batch.", ENGINE, min=0)
    prefill: str | None = prefill_flag()
    speculate: int | None = speculate_flag()
    prompt_lookup_max: int | None = prompt_lookup_max_flag()
    prompt_lookup_min: int | None = prompt_lookup_min_flag()
    speculative_config: str | None = flag(
        None, "JSON", 'All of it as vLLM takes it: {"method": "ngram", "num_speculative_tokens": K, …}.', SPECULATION
    )
    warm_up: str | None = flag(
        None,
        "all|open|aside",
        "Before ready: run every bucket; or open all and run two; or run two, and the others between requests. "
        "Default: all (open: VLLM_SKIP_WARMUP).",
        ENGINE,
    )
    traffic: str | None = order_flag()
    enforce_eager: bool = eager_flag()
    otlp_traces_endpoint: str | None = flag(
        None, "URL", "Send OpenTelemetry spans of requests to this receiver.", _LOGS
    )
    access_log: bool = switch("--access-log", "Log each request on stderr.", _LOGS)
    executor: str = executor_flag("Serve on this host, or by replicas of a Ray cluster.", _RAY)
    address: str | None = address_flag(_RAY)
    target_requests: int | None = flag(None, "N", "Requests a replica is to have. Default: 8.", _RAY, min=1)
    scale_up_after: str | None = flag(None, "T", "Load asks for that long before a replica comes. Default: 30s.", _RAY)
    scale_down_after: str | None = flag(None, "T", "And so before one goes. Default: 10m.", _RAY)
    dtype: str | None = flag(None, DTYPE_CHOICES, "Unquantised numbers.", _COMPILE)
    plan: Path | None = plan_flag(_COMPILE)

    def run(self) -> None:
        from llmc.api.serving import ServedModel
        from llmc.artifacts.local.opening import open_store

        settings = Settings.from_environment()
        config, run, options = self._config(settings), self._engine(), self._compile_options()
        scaling = {"--target-requests": self.target_requests, "--scale-up-after": self.scale_up_after}
        scaling["--scale-down-after"] = self.scale_down_after
        alone = {
            "--uds": self.uds, "--record-traffic": self.record_traffic,
            "--otlp-traces-endpoint": self.otlp_traces_endpoint,
            "--access-log": self.access_log or None,
        }  # fmt: skip
        _require_executor(self.executor, {"--address": self.address, **scaling}, alone)
        serve = _server(_local_count(self.replicas) if self.executor == LOCAL else 1)
        from llmc.server.warming import WarmUp, how_of

        store = open_store(None, settings, self.device)
        how = how_of(self.warm_up or ("open" if settings.skip_warmup else "all"))
        warming = WarmUp(how, None if self.traffic is None else uses_in(self.traffic), self.choice(settings))
        served = ServedModel(self.bundle, self.device, store, options, self.weights)

        def open_bundle(tell: Callable[[Progress], None]) -> Path:
            with messages.CompileProgress(self.as_json) as shown:
                return served.open(tell, shown)

        with nullcontext(_print_event) if self.as_json else _Reported() as report:
            if self.executor != LOCAL:
                from llmc.server.ray_serve import serve as serve_over_ray

                address, cpus = self.address or settings.ray_address, self.threads or settings.threads
                replicated = _fleet(address, self.replicas, cpus, scaling)
                served.require_there(settings)
                raise typer.Exit(
                    serve_over_ray(config, open_bundle, replicated, options=run, warm_up=warming, report=report)
                )
            code = serve(
                config, open_bundle, options=run, warm_up=warming, report=report, uds=self.uds,
                access_log=self.access_log, cache_counters=lambda: store.counters, reopen=served.reopen,
            )  # fmt: skip
        raise typer.Exit(code)

    def _config(self, settings: Settings) -> ServerConfig:
        from llmc.server.state import ServerConfig

        return ServerConfig(
            self.host, self.port, _keys("--api-key", self.api_key, settings.api_key), self.max_queued_requests,
            duration("--shutdown-timeout", self.shutdown_timeout) or 0,
            size("--max-body-size", self.max_body_size) or 0, self.served_model_name, self.record_traffic,
            self.otlp_traces_endpoint,
            self.max_connections, self.max_connections_per_client, self.max_requests_per_client,
            admin_tokens=_keys("--admin-token", self.admin_token, settings.admin_token),
            allow_model_change=self.allow_model_change,
        )  # fmt: skip

    def _engine(self) -> EngineOptions:
        from llmc.runtime.startup.opening import EngineOptions

        config = speculation(self.speculate, self.prompt_lookup_max, self.prompt_lookup_min, self.speculative_config)
        chosen = self.values("threads", "prefill_budget", "prefix_slots", "prefill", "enforce_eager")
        return EngineOptions(speculative_config=config, **chosen)

    def _compile_options(self) -> dict[str, Any]:
        """What a MODEL is compiled with, by `llmc.compile`'s names."""
        options = self.values("max_model_len", "max_num_seqs", "quantize", "dtype")
        if self.plan is None:
            return options
        from llmc.buckets.plan import Plan

        for name in ("max_model_len", "max_num_seqs"):
            if name in options:
                raise InputError(f"--plan has the limits already; leave out --{name.replace('_', '-')}")
        return {**options, "plan": Plan.load(self.plan)}


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


def _print_event(event: Event) -> None:
    """One JSON line an event on standard output; progress is asked for at /ready."""
    from llmc.server.state import Progress

    if not isinstance(event, Progress):
        echo(json.dumps({"event": type(event).__name__.lower(), **asdict(event)}))


class _Reported:
    """Lines for a person on standard error, with a bar while loading; nothing when quiet."""

    EVERY_S = 5.0

    def __init__(self) -> None:
        self._bars: dict[str, messages.StepProgress] = {}
        self._said_at = time.monotonic()

    def __enter__(self) -> _Reported:
        return self

    def __exit__(self, *error: object) -> None:
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


def _require_executor(executor: str, cluster: dict[str, Any], alone: dict[str, Any]) -> None:
    """Raise UnknownNameError for an executor that is none, InputError for flags that mean nothing to it."""
    if executor not in EXECUTORS:
        raise UnknownNameError("executor", executor, EXECUTORS)
    unused = alone if executor != LOCAL else cluster
    if given := [flag for flag, value in unused.items() if value is not None]:
        raise InputError(f"{', '.join(given)}: not for --executor {executor}; leave it out")


def _local_count(replicas: str | None) -> int:
    """Processes on this host. Raises InputError."""
    if replicas is None:
        return 1
    if not replicas.isdecimal():
        raise InputError(f"--replicas {replicas}: write it as N; of a range as load asks for with --executor ray")
    if not int(replicas):
        raise InputError("--replicas 0: nothing would serve; ask for 1 at least")
    return int(replicas)


def _fleet(address: str | None, replicas: str | None, cpus: int, scaling: dict[str, Any]) -> Fleet:
    """Replicas of a cluster. Raises InputError."""
    from llmc.server.ray_serve import Fleet

    least, _, most = (replicas or "1").partition("-")
    if not (least.isdecimal() and (most or least).isdecimal()):
        raise InputError(f"--replicas {replicas}: write it as N or MIN-MAX")
    wanted = {
        "target_requests": scaling["--target-requests"],
        "up_after_s": duration("--scale-up-after", scaling["--scale-up-after"]),
        "down_after_s": duration("--scale-down-after", scaling["--scale-down-after"]),
    }
    given = {name: value for name, value in wanted.items() if value is not None}
    return Fleet(address, int(least), int(most or least), cpus, **given)
