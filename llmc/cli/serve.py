"""`llmc serve`: an OpenAI-compatible server for a bundle."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmc.buckets.render.text import counted
from llmc.cli import output as messages
from llmc.cli.options import (
    DTYPE_CHOICES,
    ENGINE,
    SPECULATION,
    CaptureFlags,
    address_flag,
    bundle_or_model_argument,
    device_flag,
    duration,
    eager_flag,
    executor_flag,
    flag,
    order_flag,
    plan_flag,
    prefill_flag,
    prompt_lookup_max_flag,
    prompt_lookup_min_flag,
    quantize_flag,
    size,
    speculate_flag,
    speculation,
    switch,
    threads_flag,
    weights_flag,
)
from llmc.cli.output import echo
from llmc.cli.planning import uses_in
from llmc.compiler.options import EXECUTORS, LOCAL
from llmc.errors import InputError, UnknownNameError
from llmc.platforms import install_line
from llmc.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmc.runtime.startup.opening import EngineOptions
    from llmc.runtime.text.chat_format import ChatFormat
    from llmc.server.events import Event
    from llmc.server.ray_serve import Fleet
    from llmc.server.state import Progress, ServerConfig


_COMPILE, _OTHERS = "If MODEL is a checkpoint", "Bundle swaps"
_LIMITS, _LOGS, _RAY, _CHATS = "Clients", "Logs", "A Ray cluster", "Chats"


@dataclass(frozen=True, kw_only=True)
class ServeCommand(CaptureFlags):
    """Serve a bundle with the OpenAI API. Nothing is compiled while serving, and neither torch nor transformers is
    needed.

    /health answers from the start, /ready once every graph has run. Other endpoints: /metrics, /dashboard and
    /openapi.json. On SIGTERM or Ctrl-C running requests may end first; a second signal stops them.

    To swap bundles without losing a request, repoint the link or tag that BUNDLE names and send SIGHUP, or POST to
    /admin/bundle. A bundle that does not work is refused.

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
    host: str = flag("127.0.0.1", "H", "Address to listen on; 0.0.0.0 for all.")
    port: int = flag(8000, "P", "Port; 0 takes a free one and prints it.")
    api_key: list[str] | None = flag(
        None, "K", "Required API key. Repeatable. Default: LLMC_API_KEY, which ps does not show."
    )
    allowed_origins: list[str] | None = flag(
        None, "ORIGIN", 'Origin of web pages that may send requests (CORS), or "*". Repeatable.', _LIMITS
    )
    generation_config: str = flag(
        "auto",
        "auto|none",
        "Sampling parameters that the checkpoint recommends: for requests without them, or never.",
        _CHATS,
    )
    chat_format: Path | None = flag(
        None,
        "FILE",
        "How the model writes reasoning and tool calls, in the form of a bundle's chat_format.json.",
        _CHATS,
    )
    served_model_name: str | None = flag(None, "NAME", "Model name in the API. Default: the bundle's.")
    replicas: str | None = flag(
        None,
        "N|MIN-MAX",
        "Processes that share port, CPUs and weights; with --executor ray, replicas that scale in MIN-MAX. Default: 1.",
    )
    threads: int | None = threads_flag()
    device: str | None = device_flag(None, "Target device.")
    max_model_len: int | None = flag(None, "N", "Longest sequence in tokens.")
    max_num_seqs: int | None = flag(None, "N", "Sequences in flight.")
    quantize: str | None = quantize_flag("Weight format.")
    record_traffic: Path | None = flag(None, "FILE", "Append request lengths and times, for llmc plan.")
    as_json: bool = switch("--json", "Print events (listening, ready, …) as JSON lines.")
    ssl_certfile: Path | None = flag(None, "FILE", "Certificate in PEM, to serve HTTPS.", _LIMITS)
    ssl_keyfile: Path | None = flag(None, "FILE", "Its private key. Default: in the certificate's file.", _LIMITS)
    uds: Path | None = flag(None, "PATH", "Listen on a Unix socket instead of host and port.", _LIMITS)
    admin_token: list[str] | None = flag(
        None,
        "T",
        "Token for POST /admin/bundle, which swaps the bundle. Repeatable. Default: LLMC_ADMIN_TOKEN.",
        _OTHERS,
    )
    allow_model_change: bool = switch("--allow-model-change", "Allow a swap to another model or tokenizer.", _OTHERS)
    weights: str | None = weights_flag()
    max_queued_requests: int = flag(64, "N", "Queued requests; more get a 503.", _LIMITS, min=0)
    shutdown_timeout: str = flag("30s", "T", "Time for running requests after SIGTERM.", _LIMITS)
    max_body_size: str = flag("4MiB", "SIZE", "Largest request body accepted.", _LIMITS)
    max_connections: int = flag(1024, "N", "Open connections; more get a 503. 0: no limit.", _LIMITS, min=0)
    max_connections_per_client: int = flag(
        256, "N", "Connections per address; more get a 429. 0: no limit, for use behind a proxy.", _LIMITS, min=0
    )
    max_requests_per_client: int = flag(
        128, "N", "Running requests per address; more get a 429. 0: no limit, for use behind a proxy.", _LIMITS, min=0
    )
    prefill_budget: int | None = flag(None, "N", "Most prompt tokens between two decode steps.", ENGINE, min=1)
    prefix_slots: int | None = flag(None, "N", "Cache slots kept for prefixes.", ENGINE, min=0)
    prefill: str | None = prefill_flag()
    speculate: int | None = speculate_flag()
    prompt_lookup_max: int | None = prompt_lookup_max_flag()
    prompt_lookup_min: int | None = prompt_lookup_min_flag()
    speculative_config: str | None = flag(
        None, "JSON", 'All settings in vLLM\'s form: {"method": "ngram", "num_speculative_tokens": K, …}.', SPECULATION
    )
    warm_up: str | None = flag(
        None,
        "all|open|aside",
        "Before ready: all runs every bucket, open opens all and runs two, aside runs the rest between requests. "
        "Default: all (open if VLLM_SKIP_WARMUP is set).",
        ENGINE,
    )
    traffic: str | None = order_flag()
    enforce_eager: bool = eager_flag()
    otlp_traces_endpoint: str | None = flag(None, "URL", "Send OpenTelemetry request spans to this receiver.", _LOGS)
    access_log: bool = switch("--access-log", "Log each request on stderr.", _LOGS)
    executor: str = executor_flag("Serve on this host, or with replicas on a Ray cluster.", _RAY)
    address: str | None = address_flag(_RAY)
    target_requests: int | None = flag(None, "N", "Target requests per replica. Default: 8.", _RAY, min=1)
    scale_up_after: str | None = flag(None, "T", "Time of high load before a replica is added. Default: 30s.", _RAY)
    scale_down_after: str | None = flag(None, "T", "Time of low load before one is removed. Default: 10m.", _RAY)
    dtype: str | None = flag(None, DTYPE_CHOICES, "Precision of unquantized values.", _COMPILE)
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
            "--access-log": self.access_log or None, "--ssl-certfile": self.ssl_certfile,
        }  # fmt: skip
        _require_executor(self.executor, {"--address": self.address, **scaling}, alone)
        serve = _server(_local_count(self.replicas) if self.executor == LOCAL else 1)
        from llmc.server.loading import WarmUp, how_of

        store = open_store(None, settings, self.device)
        how = how_of(self.warm_up or ("open" if settings.skip_warmup else "all"))
        warming = WarmUp(how, None if self.traffic is None else uses_in(self.traffic), self.choice(settings))
        served = ServedModel(self.bundle, self.device, store, options, self.weights)

        def open_bundle(on_progress: Callable[[Progress], None]) -> Path:
            with messages.CompileProgress(self.as_json) as shown:
                return served.open(on_progress, shown)

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
            generation_config=_choice("--generation-config", self.generation_config, ("auto", "none")) == "auto",
            chat_format=None if self.chat_format is None else _chat_format(self.chat_format),
            ssl_certfile=self.ssl_certfile, ssl_keyfile=self.ssl_keyfile,
            allowed_origins=_origins(self.allowed_origins or ()),
        )  # fmt: skip

    def _engine(self) -> EngineOptions:
        from llmc.runtime.startup.opening import EngineOptions

        config = speculation(self.speculate, self.prompt_lookup_max, self.prompt_lookup_min, self.speculative_config)
        chosen = self.values("threads", "prefill_budget", "prefix_slots", "prefill", "enforce_eager")
        return EngineOptions(speculative_config=config, **chosen)

    def _compile_options(self) -> dict[str, Any]:
        options = self.values("max_model_len", "max_num_seqs", "quantize", "dtype")
        if self.plan is None:
            return options
        from llmc.buckets.plan import Plan

        for name in ("max_model_len", "max_num_seqs"):
            if name in options:
                raise InputError(f"--plan already defines the limits; leave out --{name.replace('_', '-')}")
        return {**options, "plan": Plan.load(self.plan)}


def _server(replicas: int) -> Callable[..., int]:
    try:
        from llmc.server.serve import serve

        if replicas > 1:
            from llmc.server.replicas import serve_replicas

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
        raise InputError(f"{flag} is empty; leave it out to require none (is the variable that it comes from set?)")
    return tuple(given)


def _print_event(event: Event) -> None:
    """Progress is not printed, because /ready reports it."""
    from llmc.server.state import Progress

    if not isinstance(event, Progress):
        echo(json.dumps({"event": type(event).__name__.lower(), **asdict(event)}))


_SAID = {
    "Listening": "listening on {url}",
    "Ready": "ready in {seconds:.1f} s: {model} on {device}; {warmed} warm-up steps run, compilations {compilations}",
    "WarmAside": "warm: {warmed} more buckets run between requests in {seconds:.1f} s, compilations {compilations}",
    "Swapped": "new requests run on {digest:.19} after {seconds:.1f} s, {draining} still on {previous:.19}",
    "SwapRefused": "the new bundle is refused and the old one still served: {message}",
    "Retired": "{digest:.19} is closed, {seconds:.1f} s after",
    "Draining": "{signal}: no new requests; {running} running and {waiting} waiting have {timeout_s:g} s to end "
    "(signal again to stop now)",
    "ReplicaLost": "replica {replica} ended: {reason}; another starts in {again_s:g} s",
    "ReplicaBack": "replica {replica} serves, {seconds:.1f} s after its start",
    "Dead": "the engine stopped, and /health is now 503: {message}",
    "Stopped": "stopped after {seconds:.1f} s",
}
"""Messages by event, with its fields."""


class _Reported:
    """Prints events as lines on stderr, with a bar while loading; prints nothing when quiet."""

    EVERY_S = 5.0

    def __init__(self) -> None:
        self._bar: messages.StepProgress | None = None
        self._said_at = time.monotonic()

    def __enter__(self) -> _Reported:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.__exit__(*error)
            self._bar = None

    def __call__(self, event: Event) -> None:
        from llmc.server.events import Draining, Listening, Ready, Stopped, Swapped, WarmAside
        from llmc.server.state import Progress

        if messages.quiet:
            return
        if isinstance(event, Progress):
            self._progress(event)
            return
        if isinstance(event, Ready | Draining):
            self.__exit__(None, None, None)
        text = _SAID[type(event).__name__].format_map(asdict(event))
        match event:
            case Swapped(changed=False):
                text = f"{event.digest[:19]} is already served; nothing changed"
            case WarmAside(failed=(_, *_)):
                text += f"; failed: {', '.join(event.failed)}"
            case Stopped() if event.cancelled:
                text += f", {counted(event.cancelled, 'request')} cut"
        self._say(text)
        if isinstance(event, Listening) and event.open_to_all:
            self._say("no API key is required, and other hosts can connect; --api-key sets one")

    def _progress(self, at: Progress) -> None:
        from llmc.server.loading import STAGE

        if at.stage != STAGE:  # a compile has its own progress display
            return
        if sys.stderr.isatty():
            self._bar = self._bar or messages.StepProgress(at.stage)
            self._bar("", at.done, at.total)
        elif time.monotonic() - self._said_at > self.EVERY_S:
            self._said_at = time.monotonic()
            left = "" if at.eta_s is None else f", about {at.eta_s:.0f} s left"
            self._say(f"{at.stage}: {at.done} of {at.total}{left}")

    def _say(self, text: str) -> None:
        echo(f"llmc: {text}", err=True)


def _require_executor(executor: str, cluster: dict[str, Any], alone: dict[str, Any]) -> None:
    if executor not in EXECUTORS:
        raise UnknownNameError("executor", executor, EXECUTORS)
    unused = alone if executor != LOCAL else cluster
    if given := [flag for flag, value in unused.items() if value is not None]:
        raise InputError(f"{', '.join(given)}: not available with --executor {executor}; leave it out")


def _local_count(replicas: str | None) -> int:
    if replicas is None:
        return 1
    if not replicas.isdecimal():
        raise InputError(f"--replicas {replicas}: write it as N; a range MIN-MAX needs --executor ray")
    if not int(replicas):
        raise InputError("--replicas 0: nothing would serve; give at least 1")
    return int(replicas)


def _fleet(address: str | None, replicas: str | None, cpus: int, scaling: dict[str, Any]) -> Fleet:
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


def _choice(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise UnknownNameError(name, value, known)
    return value


def _chat_format(path: Path) -> ChatFormat:
    from llmc.runtime.text.chat_format import ChatFormat

    try:
        return ChatFormat.read(path.read_bytes())
    except OSError as error:
        raise InputError(f"--chat-format {path}: {error.strerror}") from None
    except InputError as error:
        raise InputError(f"--chat-format {path}: {error}") from None


def _origins(given: Iterable[str]) -> tuple[str, ...]:
    """Also takes vLLM's form, a JSON list."""
    found: list[str] = []
    for text in given:
        try:
            listed = json.loads(text) if text.startswith("[") else [text]
        except ValueError:
            listed = [None]
        for origin in listed:
            if not isinstance(origin, str) or not (origin == "*" or re.fullmatch(r"https?://[^/\s]+", origin)):
                raise InputError(f"--allowed-origins {text}: an origin is * or as https://example.com, without a path")
            found.append(origin)
    return tuple(found)
