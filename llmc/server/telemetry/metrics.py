"""Counters, gauges and histograms for Prometheus: vLLM's names with `llmc:` for `vllm:`, and llmc's own.

The engine's thread adds to plain numbers under a lock; they become text when /metrics is read. prometheus_client
provides the formats, but not the counting: its histograms would cost 1.5 µs for every token.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from llmc.runtime.engine.observer import EngineStats, FinishReason, Observer, RequestSummary, StepRecord
from llmc.version import __version__

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from llmc.buckets.bucket import Phase
    from llmc.buckets.plan import Plan
    from llmc.runtime.engine.kv_transfer import KVTransfer
    from llmc.runtime.pooling.pooler import Statistics


MAX_SHAPES = 1024
"""Maximum number of distinct shapes while no plan is known."""


class BucketKey(NamedTuple):
    """A bucket; batch 0 stands for all steps without a bucket."""

    phase: str
    batch: int
    query: int
    context: int

    @property
    def label(self) -> str:
        """Name in metrics: batch x query + context."""
        return f"{self.batch}x{self.query}+{self.context}" if self.batch else "other"


class StepSums:
    """Sums over the steps of one bucket: steps, live rows, new tokens (live and padding), seconds of each part."""

    __slots__ = ("execute_s", "live", "padding", "prepare_s", "rows", "sample_s", "schedule_s", "steps")

    def __init__(self) -> None:
        self.steps = self.rows = self.live = self.padding = 0
        self.schedule_s = self.prepare_s = self.execute_s = self.sample_s = 0.0

    def add(self, record: StepRecord) -> None:
        """Count one step."""
        self.steps += 1
        self.rows += record.live_rows
        self.live += record.live_tokens
        self.padding += record.padding_tokens
        self.schedule_s += record.schedule_s
        self.prepare_s += record.prepare_s
        self.execute_s += record.execute_s
        self.sample_s += record.sample_s

    def merge(self, other: StepSums) -> None:
        """Add the sums of `other`."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def copy(self) -> StepSums:
        """Return an independent copy."""
        twin = StepSums()
        twin.merge(self)
        return twin

    @property
    def seconds(self) -> float:
        """Seconds of all parts."""
        return self.schedule_s + self.prepare_s + self.execute_s + self.sample_s


class BucketSums:
    """Use by bucket. Not thread-safe.

    Executables that take any shape run steps outside the buckets of `plan`. Such a step counts for the least-cost
    bucket that covers it, which bounds the number of keys.
    """

    def __init__(self, plan: Plan | None = None) -> None:
        self.plan = plan
        self.uses: dict[BucketKey, StepSums] = {}
        self._planned = _keys(plan)

    def bind(self, plan: Plan) -> None:
        """Set what is served, before its first request.

        `origin`: of its verification (local/origins.py). `plan` sets the buckets and the longest sequence. `stats` and
        `cache_counters` (hits, misses and corrupt entries of the store) are called at every scrape, in its thread.
        """
        self.plan, self._planned = plan, _keys(plan)

    def add(self, record: StepRecord) -> None:
        """Count one step."""
        use = self.uses.get((record.phase, record.batch, record.query, record.context))  # type: ignore[call-overload]
        if use is None:
            use = self._use(record)
        use.add(record)

    def take(self) -> dict[BucketKey, StepSums]:
        """Return the counts since the last call, and reset them."""
        taken, self.uses = self.uses, {}
        return taken

    def copy(self) -> dict[BucketKey, StepSums]:
        """Return a copy of the counts so far."""
        return {key: use.copy() for key, use in self.uses.items()}

    def _use(self, record: StepRecord) -> StepSums:
        key = BucketKey(record.phase, record.batch, record.query, record.context)
        if not (len(self.uses) < MAX_SHAPES if self.plan is None else key in self._planned):
            key = self._covering(record)
        return self.uses.setdefault(key, StepSums())

    def _covering(self, record: StepRecord) -> BucketKey:
        if self.plan is not None:
            phase: Phase = "decode" if record.phase == "decode" else "prompt"
            bucket = self.plan.lookup(phase, record.batch, record.query, record.context)
            if bucket is not None:
                return BucketKey(bucket.phase, bucket.batch, bucket.query, bucket.context)
        return BucketKey(record.phase, 0, 0, 0)


def merged(into: dict[BucketKey, StepSums], more: dict[BucketKey, StepSums]) -> None:
    """Add the sums of `more` to those of `into`."""
    for key, use in more.items():
        if key in into:
            into[key].merge(use)
        else:
            into[key] = use.copy()


def _keys(plan: Plan | None) -> frozenset[BucketKey]:
    return frozenset(BucketKey(b.phase, b.batch, b.query, b.context) for b in (plan.buckets if plan else ()))


FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
"""Seconds from arrival to the first token; the upper bounds are vLLM's, so that its dashboards fit."""

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
"""Seconds that a replica gets to report its metrics."""
REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
PHASES = ("prompt", "decode")
PARTS = ("schedule", "prepare", "execute", "sample")
CACHE_EVENTS = ("hits", "misses", "corrupt")
SWAP_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
DEFAULT_LENGTH = 131072
"""Last bound of token histograms while the model's limit is unknown."""

COUNTERS = {
    "prompt_tokens": "Prompt tokens of admitted requests, cached ones included.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Prompt tokens looked for in retained prefixes.",
    "prefix_cache_hits": "Prompt tokens found in a retained prefix.",
    "bucket_miss": "Steps that no bucket covered as planned.",
    "kv_transfer_prompts": "Prompts prefilled by another device.",
    "kv_transfer_bytes": "Bytes of keys, values and logits of these prompts.",
    "spec_decode_num_drafts": "Rows of decode steps that had a draft.",
    "spec_decode_num_draft_tokens": "Tokens drafted.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Seconds from a request's arrival to its first token.", FIRST_TOKEN_S),
    "inter_token_latency_seconds": ("Seconds from a token to the next of its sequence.", INTER_TOKEN_S),
    "e2e_request_latency_seconds": ("Seconds from a request's arrival to its end.", REQUEST_S),
    "request_queue_time_seconds": ("Seconds a request waited for a slot.", REQUEST_S),
    "request_inference_time_seconds": ("Seconds from a request's slot to its end.", REQUEST_S),
    "request_prefill_time_seconds": ("Seconds from a request's slot to its first token.", REQUEST_S),
    "request_decode_time_seconds": ("Seconds from a request's first token to its end.", REQUEST_S),
    "kv_transfer_time_seconds": ("Seconds of transferring a prompt's keys and values.", TRANSFER_S),
    "kv_transfer_wait_seconds": ("Seconds that a prefilled prompt waited for transfer and slot.", TRANSFER_S),
    "request_prompt_tokens": ("Prompt tokens of a request.", None),
    "request_generation_tokens": ("Tokens generated for a request, all its choices together.", None),
    "request_params_max_tokens": ("max_tokens of a request that set it.", None),
    "request_params_n": ("Choices (n) of a request.", CHOICES),
    "iteration_tokens_total": ("Live tokens of a step.", STEP_TOKENS),
    "bundle_swap_seconds": ("Seconds from a swap's beginning until new requests ran on the new bundle.", SWAP_S),
    "bundle_drain_seconds": ("Seconds from a swap until the last request on the old bundle ended.", SWAP_S),
}
"""Name, help text, and upper bounds; None: 1, 2, 5, 10 … up to the model's length."""


POOLED = {
    "requests": "Embedding and scoring requests answered.",
    "rows": "Texts, or pairs of texts, in these requests.",
    "tokens": "Tokens of these texts.",
    "padded_tokens": "Tokens that graphs computed for these texts, padding included.",
    "steps": "Batches of these texts that ran.",
    "seconds": "Seconds that these batches ran, summed over all streams.",
}
"""Counters of a model that embeds or scores, with the prefix "pooling_"."""


def labelled(families: Sequence[Metric], replica: str) -> Sequence[Metric]:
    """Return the families with a replica label on each sample."""
    for family in families:
        family.samples = [sample._replace(labels={**sample.labels, "replica": replica}) for sample in family.samples]
    return families


def together(reported: Iterable[Sequence[Metric]]) -> Sequence[Metric]:
    """Merge families of several replicas by name, as the format requires."""
    found: dict[str, Metric] = {}
    for families in reported:
        for family in families:
            if family.name in found:
                found[family.name].samples += family.samples
            else:
                found[family.name] = family
    return list(found.values())


def text_of(families: Sequence[Metric], accept: str = "") -> tuple[bytes, str]:
    """Return metrics as text with its content type: OpenMetrics if the Accept header requests it."""
    found: Any = SimpleNamespace(collect=lambda: families)  # the only member of a registry that both use
    # with name escaping, prometheus_client 0.26 replaces the colon of samples, though not of families, by "_";
    # these names need no escaping
    if "application/openmetrics-text" in accept:
        text: bytes = openmetrics.generate_latest(found, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return text, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(found, openmetrics.ALLOWUTF8), CONTENT_TYPE_PLAIN_0_0_4


def one_two_five(largest: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10, 20, 50 … up to `largest`."""
    bounds: list[int] = []
    power = 1
    while power <= largest:
        bounds += [m * power for m in (1, 2, 5) if m * power <= largest]
        power *= 10
    return tuple(bounds)


class Histogram:
    """Counts of values by inclusive upper bound, and their sum. Not thread-safe."""

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
        """Count several values."""
        bounds, counts = self.bounds, self.counts
        total = 0.0
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self.sum += total

    def copy(self) -> Histogram:
        """Return an independent copy."""
        twin = Histogram(self.bounds)
        twin.counts, twin.sum = self.counts.copy(), self.sum
        return twin

    @property
    def cumulative(self) -> list[int]:
        """Counts of values up to each bound; the last is the total."""
        return list(accumulate(self.counts))


class Metrics(Observer, Collector):
    """All metrics of /metrics; `registry` holds them, and CPU and memory of the process.

    Every sample has the label `model_name`. `bind` sets what is known only after loading. Like vLLM, some counts are
    per sequence: `request_success_total` counts each choice by its finish reason, cancelled ones (abort) included. A
    prompt's tokens are counted when it is admitted.
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
        """Set what is served, before its first request.

        `origin`: of its verification (local/origins.py). `plan` sets the buckets and the longest sequence. `stats` and
        `cache_counters` (hits, misses and corrupt entries of the store) are called at every scrape, in its thread.
        """
        with self._lock:
            self._model_name, self._stats, self._device, self._origin = model_name, stats, device, origin
            self._cache_counters, self._digest, self._pooled = cache_counters or dict, digest, None
            if plan is not None:
                self._uses.bind(plan)
                if not sum(self._histograms["request_prompt_tokens"].counts):
                    self._make_histograms(plan.limits.max_model_len)

    def bind_pooling(self, statistics: Callable[[], Statistics]) -> None:
        """Set the counters of a model that embeds or scores; called at every scrape."""
        self._pooled = statistics

    def families(self, *, ready: bool = False) -> list[Metric]:
        """Return all current families."""
        self._ready = ready
        return list(self.registry.collect())

    def render(self, accept: str = "", *, ready: bool = False) -> tuple[bytes, str]:
        """Return all metrics as text with its content type; see `text_of`."""
        return text_of(self.families(ready=ready), accept)

    def swapped(self, seconds: float) -> None:
        """Count a swap: seconds until new requests ran on the new bundle."""
        with self._lock:
            self._swaps["done", ""] += 1
            self._histograms["bundle_swap_seconds"].observe(seconds)

    def retired(self, seconds: float) -> None:
        """Count the seconds that requests still ran on the old bundle."""
        with self._lock:
            self._histograms["bundle_drain_seconds"].observe(seconds)

    def swap_refused(self, reason: str) -> None:
        """Count a refused bundle."""
        with self._lock:
            self._swaps["refused", reason] = self._swaps.get(("refused", reason), 0) + 1

    def http(self, route: str, status: int) -> None:
        """Count a response; `route` is the route's template: paths as sent would be unbounded."""
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
        """Count the step for its bucket; steps that only import prompts into slots have none."""
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
        """Count the prompt, its bytes, and its transfer time."""
        with self._lock:
            self._counts["kv_transfer_prompts"] += 1
            self._counts["kv_transfer_bytes"] += cost.bytes
            self._histograms["kv_transfer_time_seconds"].observe(cost.moving_s)
            self._histograms["kv_transfer_wait_seconds"].observe(cost.wait_s)

    def emitted(self, first_token_s: Sequence[float], inter_token_s: Sequence[float]) -> None:
        """Count the tokens and their latencies."""
        with self._lock:
            self._counts["generation_tokens"] += len(first_token_s) + len(inter_token_s)
            self._first.observe_all(first_token_s)
            self._inter.observe_all(inter_token_s)

    def finished(self, summary: RequestSummary) -> None:
        """Count the request and the durations of the parts it completed."""
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
        """Return nothing: this is the only collector of its registry, so names need no check."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield all families with their current values."""
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
            ("kv_cache_usage_perc", "Fraction of the KV cache in use, 0 to 1.", stats.kv_cache_usage if stats else 0),
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
        yield self._counter("bundle_swaps", "Bundles swapped in or refused, and why.", ("result", "reason"), swaps)
        for name, what in COUNTERS.items():
            yield self._counter(name, what, (), [((), counts[name])])
        compilations = stats.compilations if stats else 0
        yield self._counter("unplanned_compile", "Graphs compiled while serving; 0 expected.", (), [((), compilations)])
        opened = stats.compilations_at_open if stats else 0
        what = "Graphs that the device's toolchain compiled at opening, before any request used them."
        yield self._counter("compilations_at_open", what, (), [((), opened)])
        for event in CACHE_EVENTS:
            what = f"Artifact store look-ups: {event}."
            yield self._counter(f"artifact_cache_{event}", what, (), [((), cache.get(event, 0))])
        ended = [((reason,), number) for reason, number in reasons.items()]
        yield self._counter("request_success", "Finished sequences by reason.", ("finished_reason",), ended)
        yield self._counter("http_requests", "Responses by route and status.", ("route", "status"), http.items())
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
        yield self._counter("padding_tokens", "Padding tokens computed.", ("phase",), padding)
        seconds = [
            ((phase, part), sum(getattr(use, f"{part}_s") for use in found))
            for phase, found in phases.items()
            for part in PARTS
        ]
        yield self._counter("step_seconds", "Seconds of steps by part of the work.", ("phase", "part"), seconds)
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
