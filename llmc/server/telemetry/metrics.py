"""Counters, gauges and histograms for Prometheus: vLLM's names with `llmc:` for `vllm:`, and llmc's own.

The engine's thread adds to plain numbers under a lock; text is made of them when /metrics is read. prometheus_client
gives the formats, not the counting: its histograms would cost 1.5 µs for every token.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from llmc.runtime.engine.observer import EngineStats, FinishReason, Observer, RequestSummary, StepRecord
from llmc.server.telemetry.bucket_use import BucketSums
from llmc.version import __version__

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from llmc.buckets.plan import Plan
    from llmc.runtime.engine.kv_transfer import KVTransfer
    from llmc.runtime.pooling.pooler import Statistics

FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
"""Upper bounds as vLLM has them, so that its dashboards fit; seconds from arrival to the first token."""

INTER_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
TRANSFER_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20)

PREFIX = "llmc:"
SCRAPE_S = 5.0
"""Seconds that a replica gets to tell its metrics."""
REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
PHASES = ("prompt", "decode")
PARTS = ("schedule", "prepare", "execute", "sample")
CACHE_EVENTS = ("hits", "misses", "corrupt")
SWAP_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
DEFAULT_LENGTH = 131072
"""Where token histograms end while the model's limit is not known."""

COUNTERS = {
    "prompt_tokens": "Prompt tokens of admitted requests, cached ones included.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Prompt tokens looked for in retained prefixes.",
    "prefix_cache_hits": "Prompt tokens found in a retained prefix.",
    "bucket_miss": "Steps that no bucket covered as planned.",
    "kv_transfer_prompts": "Prompts that another device computed.",
    "kv_transfer_bytes": "Bytes of their keys, values and logits.",
    "spec_decode_num_drafts": "Rows of decode steps that had a draft.",
    "spec_decode_num_draft_tokens": "Tokens drafted.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that held.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Seconds from a request's arrival to its first token.", FIRST_TOKEN_S),
    "inter_token_latency_seconds": ("Seconds from a token to the next of its sequence.", INTER_TOKEN_S),
    "e2e_request_latency_seconds": ("Seconds from a request's arrival to its end.", REQUEST_S),
    "request_queue_time_seconds": ("Seconds a request waited for a slot.", REQUEST_S),
    "request_inference_time_seconds": ("Seconds from a request's slot to its end.", REQUEST_S),
    "request_prefill_time_seconds": ("Seconds from a request's slot to its first token.", REQUEST_S),
    "request_decode_time_seconds": ("Seconds from a request's first token to its end.", REQUEST_S),
    "kv_transfer_time_seconds": ("Seconds that moving a prompt's keys and values took.", TRANSFER_S),
    "kv_transfer_wait_seconds": ("Seconds that a computed prompt waited for its transport and slot.", TRANSFER_S),
    "request_prompt_tokens": ("Prompt tokens of a request.", None),
    "request_generation_tokens": ("Tokens generated for a request, all its choices together.", None),
    "request_params_max_tokens": ("max_tokens of a request that gave it.", None),
    "request_params_n": ("Choices a request asked for.", CHOICES),
    "iteration_tokens_total": ("Live tokens of a step.", STEP_TOKENS),
    "bundle_swap_seconds": ("Seconds from a swap's beginning until new requests ran on the new bundle.", SWAP_S),
    "bundle_drain_seconds": ("Seconds from there until the last request on the old bundle ended.", SWAP_S),
}
"""Name, help text, and upper bounds; None: 1, 2, 5, 10 … up to the model's length."""


POOLED = {
    "requests": "Requests to embed or score that were answered.",
    "rows": "Texts, or pairs of texts, that they had.",
    "tokens": "Tokens of these.",
    "padded_tokens": "Tokens that graphs computed for them, padding included.",
    "steps": "Batches that ran.",
    "seconds": "Seconds that batches ran for, of all streams together.",
}
"""Counters of a model that embeds or scores, behind "pooling_"."""


def labelled(families: Sequence[Metric], replica: str) -> Sequence[Metric]:
    """The same families, each sample with the label."""
    for family in families:
        family.samples = [sample._replace(labels={**sample.labels, "replica": replica}) for sample in family.samples]
    return families


def together(reported: Iterable[Sequence[Metric]]) -> Sequence[Metric]:
    """A family that several tell of is there once, as the format asks for."""
    found: dict[str, Metric] = {}
    for families in reported:
        for family in families:
            if family.name in found:
                found[family.name].samples += family.samples
            else:
                found[family.name] = family
    return list(found.values())


def text_of(families: Sequence[Metric], accept: str = "") -> tuple[bytes, str]:
    """Metrics as text, and its content type: OpenMetrics where the Accept header asks for it."""
    found: Any = SimpleNamespace(collect=lambda: families)  # all that both ask a registry for
    # asked to escape names, prometheus_client 0.26 turns the colon of samples, though not of families, into "_";
    # these names need no escaping
    if "application/openmetrics-text" in accept:
        text: bytes = openmetrics.generate_latest(found, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return text, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(found, openmetrics.ALLOWUTF8), CONTENT_TYPE_PLAIN_0_0_4


def one_two_five(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 … up to `largest`."""
    bounds: list[int] = []
    power = 1
    while power <= largest:
        bounds += [m * power for m in (1, 2, 5) if m * power <= largest]
        power *= 10
    return tuple(bounds)


class Histogram:
    """Counts of values by upper bound, the bound itself included, and their sum. Not thread-safe."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        """Count several."""
        bounds, counts = self.bounds, self.counts
        total = 0.0
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self.sum += total

    def copy(self) -> Histogram:
        """The same counts, which later values do not change."""
        twin = Histogram(self.bounds)
        twin.counts, twin.sum = self.counts.copy(), self.sum
        return twin

    @property
    def cumulative(self) -> list[int]:
        """How many values are at most each bound; the last: all."""
        return list(accumulate(self.counts))


class Metrics(Observer, Collector):
    """All that /metrics tells; `registry` holds it, and the process's CPU and memory.

    Every sample has the label `model_name`. What is known only after loading comes by `bind`. Counts that vLLM makes
    by sequence are by sequence here: `request_success_total` counts each of a request's choices by how it ended,
    cancelled ones (abort) included. A prompt's tokens are counted when it is admitted.
    """

    def __init__(self, model_name: str = "") -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._device = ""
        self._origin: str | None = None
        self._digest: str | None = None
        self._swaps: dict[tuple[str, str], int] = {("done", ""): 0}
        self._stats: Callable[[], EngineStats | None] = lambda: None
        self._cache_counters: Callable[[], Mapping[str, int]] = dict
        self._pooled: Callable[[], Statistics] | None = None
        self._lock = threading.Lock()
        self._ready = False
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._reasons = dict.fromkeys(REASONS, 0)
        self._http: dict[tuple[str, str], int] = {}
        self._prompts: dict[str, int] = {}
        self._uses = BucketSums()
        self._histograms: dict[str, Histogram] = {}
        self._make_histograms(DEFAULT_LENGTH)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def bind(
        self, model_name: str, stats: Callable[[], EngineStats | None],
        cache_counters: Callable[[], Mapping[str, int]] | None = None, plan: Plan | None = None, device: str = "",
        origin: str | None = None, digest: str | None = None,
    ) -> None:  # fmt: skip
        """Say what is served, before its first request; `origin` is that of its verification (local/origins.py),
        `digest` the bundle's.

        `stats` and `cache_counters` (hits, misses and corrupt of the artifact store) are called at every scrape, in
        the scraper's thread; `plan` names the buckets and the longest sequence.
        """
        with self._lock:
            self._model_name, self._stats, self._device, self._origin = model_name, stats, device, origin
            self._cache_counters, self._digest, self._pooled = cache_counters or dict, digest, None
            if plan is not None:
                self._uses.bind(plan)
                if not sum(self._histograms["request_prompt_tokens"].counts):
                    self._make_histograms(plan.limits.max_model_len)

    def bind_pooling(self, statistics: Callable[[], Statistics]) -> None:
        """Say what counts the rows of a model that embeds or scores; called at every scrape."""
        self._pooled = statistics

    def families(self, *, ready: bool = False) -> list[Metric]:
        """Everything that is there now."""
        self._ready = ready
        return list(self.registry.collect())

    def render(self, accept: str = "", *, ready: bool = False) -> tuple[bytes, str]:
        """Everything as text, and its content type; see `text_of`."""
        return text_of(self.families(ready=ready), accept)

    def swapped(self, seconds: float) -> None:
        """Count a swap, which took so long until new requests ran on the new bundle."""
        with self._lock:
            self._swaps["done", ""] += 1
            self._histograms["bundle_swap_seconds"].observe(seconds)

    def retired(self, seconds: float) -> None:
        """Count the time that requests still ran on the old one."""
        with self._lock:
            self._histograms["bundle_drain_seconds"].observe(seconds)

    def swap_refused(self, reason: str) -> None:
        """Count a bundle that was not taken."""
        with self._lock:
            self._swaps["refused", reason] = self._swaps.get(("refused", reason), 0) + 1

    def http(self, route: str, status: int) -> None:
        """Count an answer; `route` is the route's template, never the path as sent, of which there is no end."""
        with self._lock:
            key = route, str(status)
            self._http[key] = self._http.get(key, 0) + 1

    # From the engine

    def arrived(self, request_id: str, prompt_tokens: int) -> None:
        """Remember the prompt's length until it is admitted."""
        with self._lock:
            self._prompts[request_id] = prompt_tokens

    def admitted(self, request_id: str, queue_s: float, cached_tokens: int) -> None:
        """Count the prompt."""
        with self._lock:
            prompt = self._prompts.pop(request_id, 0)
            counts = self._counts
            counts["prompt_tokens"] += prompt
            counts["prefix_cache_queries"] += prompt
            counts["prefix_cache_hits"] += cached_tokens

    def stepped(self, record: StepRecord) -> None:
        """Count the step for its bucket; one that put prompts into their slots has none."""
        if record.handed:
            return
        with self._lock:
            self._uses.add(record)
            self._steps.observe(record.live_tokens)
            counts = self._counts
            if record.miss:
                counts["bucket_miss"] += 1
            if record.drafted:
                counts["spec_decode_num_drafts"] += record.drafts
                counts["spec_decode_num_draft_tokens"] += record.drafted
                counts["spec_decode_num_accepted_tokens"] += record.accepted

    def handed_over(self, cost: KVTransfer) -> None:
        """Count the prompt, its bytes, and what moving it took."""
        with self._lock:
            self._counts["kv_transfer_prompts"] += 1
            self._counts["kv_transfer_bytes"] += cost.bytes
            self._histograms["kv_transfer_time_seconds"].observe(cost.moving_s)
            self._histograms["kv_transfer_wait_seconds"].observe(cost.wait_s)

    def emitted(self, first_token_s: Sequence[float], inter_token_s: Sequence[float]) -> None:
        """Count the tokens, and their times."""
        with self._lock:
            self._counts["generation_tokens"] += len(first_token_s) + len(inter_token_s)
            self._first.observe_all(first_token_s)
            self._inter.observe_all(inter_token_s)

    def finished(self, summary: RequestSummary) -> None:
        """Count the request, and how long each part of it took, as far as it came."""
        since_slot = None if summary.queue_s is None else summary.e2e_s - summary.queue_s
        seen: dict[str, float | None] = {
            "e2e_request_latency_seconds": summary.e2e_s,
            "request_queue_time_seconds": summary.queue_s,
            "request_inference_time_seconds": since_slot,
            "request_prefill_time_seconds": summary.prefill_s,
            "request_decode_time_seconds": summary.decode_s,
            "request_prompt_tokens": summary.prompt_tokens,
            "request_generation_tokens": summary.output_tokens,
            "request_params_max_tokens": summary.max_tokens,
            "request_params_n": summary.n,
        }
        with self._lock:
            self._prompts.pop(summary.request_id, None)
            for reason in summary.finish_reasons:
                self._reasons[reason] += 1
            for name, value in seen.items():
                if value is not None:
                    self._histograms[name].observe(value)

    # For the scraper

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead of time: names need no check, since this is the only collector that makes them."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """All families, as they are now."""
        stats = self._stats()
        cache = self._cache_counters()
        with self._lock:
            counts, reasons, http = self._counts.copy(), self._reasons.copy(), self._http.copy()
            uses = self._uses.copy()
            histograms = {name: histogram.copy() for name, histogram in self._histograms.items()}
            swaps = list(self._swaps.items())
        for name, what, value in (
            ("num_requests_running", "Requests that hold a slot.", stats.running if stats else 0),
            ("num_requests_waiting", "Requests that wait for a slot.", stats.waiting if stats else 0),
            ("kv_cache_usage_perc", "Share of the KV cache in use, 1 is all.", stats.kv_cache_usage if stats else 0),
            ("ready", "1 while the server takes requests.", int(self._ready)),
        ):
            yield self._gauge(name, what, (), [((), value)])
        if self._pooled is not None:
            pooled = asdict(self._pooled())
            for name, what in POOLED.items():
                yield self._counter(f"pooling_{name}", what, (), [((), pooled[name])])
        build = [((__version__, self._device), 1)]
        yield self._gauge("build_info", "Version and device.", ("version", "device"), build)
        known = [] if self._origin is None else [((self._origin,), 1)]
        what = "Where the bundle's verification comes from: made here, signed by a trusted key, unsigned, or none."
        yield self._gauge("verification_info", what, ("origin",), known)
        digests = [] if self._digest is None else [((self._digest,), 1)]
        yield self._gauge("bundle_info", "The digest of the bundle that is served.", ("digest",), digests)
        yield self._counter("bundle_swaps", "Bundles taken or refused, and why.", ("result", "reason"), swaps)
        for name, what in COUNTERS.items():
            yield self._counter(name, what, (), [((), counts[name])])
        compilations = stats.compilations if stats else 0
        yield self._counter("unplanned_compile", "Graphs compiled while serving: 0.", (), [((), compilations)])
        opened = stats.compilations_at_open if stats else 0
        what = "Graphs that the device's toolchain compiled when they were opened, before a request could use them."
        yield self._counter("compilations_at_open", what, (), [((), opened)])
        for event in CACHE_EVENTS:
            what = f"Artifact store look-ups: {event}."
            yield self._counter(f"artifact_cache_{event}", what, (), [((), cache.get(event, 0))])
        ended = [((reason,), number) for reason, number in reasons.items()]
        yield self._counter("request_success", "Sequences that ended, by how.", ("finished_reason",), ended)
        yield self._counter("http_requests", "Answers by route and status.", ("route", "status"), http.items())
        yield self._counter(
            "bucket_requests", "Live rows that ran in a bucket.", ("phase", "bucket"),
            [((key.phase, key.label), use.rows) for key, use in uses.items()],
        )  # fmt: skip
        yield self._counter(
            "bucket_steps", "Steps that ran in a bucket.", ("phase", "bucket"),
            [((key.phase, key.label), use.steps) for key, use in uses.items()],
        )  # fmt: skip
        phases = {phase: [use for key, use in uses.items() if key.phase == phase] for phase in PHASES}
        padding = [((phase,), sum(use.padding for use in found)) for phase, found in phases.items()]
        yield self._counter("padding_tokens", "New tokens computed for nothing.", ("phase",), padding)
        seconds = [
            ((phase, part), sum(getattr(use, f"{part}_s") for use in found))
            for phase, found in phases.items()
            for part in PARTS
        ]
        yield self._counter("step_seconds", "Seconds of steps, by part of the work.", ("phase", "part"), seconds)
        for name, histogram in histograms.items():
            family = HistogramMetricFamily(PREFIX + name, HISTOGRAMS[name][0], labels=("model_name",))
            bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
            pairs = list(zip(bounds, histogram.cumulative, strict=True))
            family.add_metric((self._model_name,), pairs, histogram.sum)
            yield family

    def _counter(
        self, name: str, what: str, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], float]]
    ) -> Metric:
        return self._filled(CounterMetricFamily(PREFIX + name, what, labels=("model_name", *labels)), samples)

    def _gauge(
        self, name: str, what: str, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], float]]
    ) -> Metric:
        return self._filled(GaugeMetricFamily(PREFIX + name, what, labels=("model_name", *labels)), samples)

    def _filled(
        self, family: CounterMetricFamily | GaugeMetricFamily, samples: Iterable[tuple[tuple[str, ...], float]]
    ) -> Metric:
        for values, value in samples:
            family.add_metric((self._model_name, *values), value)
        return family

    def _make_histograms(self, longest: int) -> None:
        lengths = one_two_five(longest)
        self._histograms = {name: Histogram(bounds or lengths) for name, (_, bounds) in HISTOGRAMS.items()}
        self._steps = self._histograms["iteration_tokens_total"]
        self._first = self._histograms["time_to_first_token_seconds"]
        self._inter = self._histograms["inter_token_latency_seconds"]
