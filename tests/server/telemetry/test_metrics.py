"""Every number of /metrics, exactly."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmc import __version__
from llmc.buckets.traffic.reader import Trace
from llmc.runtime.engine.kv_transfer import KVTransfer
from llmc.runtime.engine.observer import HANDED_OVER, EngineStats, Observers
from llmc.server.telemetry.metrics import Histogram, Metrics
from llmc.testing.toy import toy_plan
from tests.server.telemetry.samples import Kept, engine, run, step, summary, toy_bundle

Samples = dict[tuple[str, ...], float]


def samples(metrics: Metrics, **more: bool) -> Samples:
    """Each sample by its name and its labels' values but for model_name."""
    found: Samples = {}
    for family in text_string_to_metric_families(metrics.render(**more)[0].decode()):
        for sample in family.samples:
            labels = [value for name, value in sorted(sample.labels.items()) if name != "model_name"]
            found[(sample.name, *labels)] = sample.value
    return found


def histogram(found: Samples, name: str) -> dict[str | float, float]:
    """Samples at most each bound, where that grows; their number and their sum."""
    buckets = [(float(labels[1]), n) for labels, n in found.items() if labels[0] == f"{name}_bucket"]
    grown = {bound: n for i, (bound, n) in enumerate(buckets) if n != (buckets[i - 1][1] if i else 0)}
    return {**grown, "count": found[(f"{name}_count",)], "sum": found[(f"{name}_sum",)]}


def test_a_fresh_server_has_every_name_at_zero() -> None:
    found = samples(Metrics("m"))
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
        "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total", "artifact_cache_hits_total",
        "artifact_cache_misses_total", "artifact_cache_corrupt_total", "bucket_miss_total", "unplanned_compile_total",
        "compilations_at_open_total", "ready", "time_to_first_token_seconds_count", "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_count", "request_queue_time_seconds_count", "request_prefill_time_seconds_count",
        "request_decode_time_seconds_count", "request_inference_time_seconds_count", "request_prompt_tokens_count",
        "request_generation_tokens_count", "request_params_n_count", "request_params_max_tokens_count",
        "iteration_tokens_total_count", "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total", "kv_transfer_prompts_total", "kv_transfer_bytes_total",
        "kv_transfer_time_seconds_count", "kv_transfer_wait_seconds_count",
    ):  # fmt: skip
        assert found[(f"llmc:{name}",)] == 0, name
    for reason in ("stop", "length", "abort", "error"):
        assert found[("llmc:request_success_total", reason)] == 0
    for phase in ("prompt", "decode"):
        assert found[("llmc:padding_tokens_total", phase)] == 0
        for part in ("schedule", "prepare", "execute", "sample"):
            assert found[("llmc:step_seconds_total", part, phase)] == 0
    assert found[("llmc:build_info", "", __version__)] == 1
    assert found[("process_resident_memory_bytes",)] > 0


@pytest.mark.parametrize("origin", ["here", "signed", "unsigned", "none"])
def test_where_the_verification_comes_from_is_a_label_once_that_is_known(origin: str) -> None:
    metrics = Metrics()
    assert not any(name[0] == "llmc:verification_info" for name in samples(metrics))
    metrics.bind("m", lambda: None, origin=origin)
    assert [labels[1:] for labels in samples(metrics) if labels[0] == "llmc:verification_info"] == [(origin,)]


def test_drafts_are_counted_by_vllms_names() -> None:
    metrics = Metrics()
    metrics.stepped(step(drafts=2, drafted=7, accepted=3))
    metrics.stepped(step())
    metrics.stepped(step(drafts=1, drafted=4))
    found = samples(metrics)
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    assert [found[(f"llmc:spec_decode_{name}_total",)] for name in names] == [3, 11, 3]


def test_every_sample_of_ours_names_the_model() -> None:
    metrics = Metrics()
    metrics.bind('a "model"\n', lambda: None)
    metrics.stepped(step())
    metrics.http("/v1/models", 200)
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            assert not sample.name.startswith("llmc:") or sample.labels["model_name"] == 'a "model"\n', sample


def test_a_prompt_counts_once_when_it_is_admitted() -> None:
    metrics = Metrics()
    metrics.arrived("a", 10)
    assert samples(metrics)[("llmc:prompt_tokens_total",)] == 0
    metrics.admitted("a", 0.5, 4)
    metrics.arrived("b", 100)
    metrics.finished(summary("b", finish_reasons=("abort",), queue_s=None))
    metrics.admitted("b", 0.5, 0)
    found = samples(metrics)
    assert found[("llmc:prompt_tokens_total",)] == 10
    assert found[("llmc:prefix_cache_queries_total",)] == 10
    assert found[("llmc:prefix_cache_hits_total",)] == 4


def test_tokens_and_their_times() -> None:
    metrics = Metrics()
    metrics.emitted([0.001, 0.3], [])
    metrics.emitted([], [0.02, 0.02, 100.0])
    found = samples(metrics)
    assert found[("llmc:generation_tokens_total",)] == 5
    first = histogram(found, "llmc:time_to_first_token_seconds")
    assert first == {0.001: 1, 0.5: 2, "count": 2, "sum": pytest.approx(0.301)}
    inter = histogram(found, "llmc:inter_token_latency_seconds")
    assert inter == {0.025: 2, math.inf: 3, "count": 3, "sum": pytest.approx(100.04)}


def test_a_value_counts_for_the_first_bound_that_it_is_not_above() -> None:
    one, several = Histogram((1, 2)), Histogram((1, 2))
    values = [0.5, 1, 1.0001, 2, 2.0001]
    for value in values:
        one.observe(value)
    several.observe_all(values)
    assert one.cumulative == several.cumulative == [2, 4, 5]
    assert one.sum == several.sum == pytest.approx(6.5002)


def test_steps_count_for_their_bucket_and_phase() -> None:
    metrics = Metrics()
    metrics.bind("m", lambda: None, plan=toy_plan())
    metrics.stepped(step(context=16))
    metrics.stepped(step(context=16, live_rows=4, live_tokens=4, padding_tokens=0))
    metrics.stepped(step("prompt", 1, 16, 0, live_rows=1, live_tokens=9, padding_tokens=7, miss=True))
    found = samples(metrics)
    assert found[("llmc:bucket_requests_total", "4x1+16", "decode")] == 7
    assert found[("llmc:bucket_steps_total", "4x1+16", "decode")] == 2
    assert found[("llmc:bucket_requests_total", "1x16+0", "prompt")] == 1
    assert found[("llmc:bucket_steps_total", "1x16+0", "prompt")] == 1
    assert found[("llmc:padding_tokens_total", "decode")] == 1
    assert found[("llmc:padding_tokens_total", "prompt")] == 7
    assert found[("llmc:bucket_miss_total",)] == 1
    for part, seconds in (("schedule", 0.001), ("prepare", 0.002), ("execute", 0.006), ("sample", 0.001)):
        assert found[("llmc:step_seconds_total", part, "decode")] == pytest.approx(2 * seconds)
        assert found[("llmc:step_seconds_total", part, "prompt")] == pytest.approx(seconds)
    assert histogram(found, "llmc:iteration_tokens_total") == {8: 2, 16: 3, "count": 3, "sum": 16}


def test_an_end_counts_each_choice_and_each_time_it_came_to() -> None:
    metrics = Metrics()
    metrics.bind("m", lambda: None, plan=toy_plan())
    metrics.finished(summary("a", finish_reasons=("stop", "length"), n=2))
    metrics.finished(summary("b", finish_reasons=("abort",), queue_s=None, prefill_s=None, decode_s=None,
                             first_token_s=None, max_tokens=None, output_tokens=0, e2e_s=0.25))  # fmt: skip
    found = samples(metrics)
    ended = {reason: found[("llmc:request_success_total", reason)] for reason in ("stop", "length", "abort", "error")}
    assert ended == {"stop": 1, "length": 1, "abort": 1, "error": 0}
    expected = {
        "e2e_request_latency_seconds": {0.3: 1, 5: 2, "count": 2, "sum": 3.25},
        "request_queue_time_seconds": {0.5: 1, "count": 1, "sum": 0.5},
        "request_inference_time_seconds": {2.5: 1, "count": 1, "sum": 2.5},
        "request_prefill_time_seconds": {0.5: 1, "count": 1, "sum": 0.5},
        "request_decode_time_seconds": {2: 1, "count": 1, "sum": 2.0},
        "request_prompt_tokens": {10: 2, "count": 2, "sum": 20},
        "request_generation_tokens": {1: 1, 5: 2, "count": 2, "sum": 5},
        "request_params_n": {1: 1, 2: 2, "count": 2, "sum": 3},
        "request_params_max_tokens": {10: 1, "count": 1, "sum": 7},
    }
    for name, values in expected.items():
        assert histogram(found, f"llmc:{name}") == values, name


def test_token_histograms_end_at_the_models_length() -> None:
    metrics = Metrics()
    metrics.bind("m", lambda: None, plan=toy_plan())
    bounds = [labels[1] for labels in samples(metrics) if labels[0] == "llmc:request_prompt_tokens_bucket"]
    assert [float(bound) for bound in bounds] == [1, 2, 5, 10, 20, float("inf")]


def test_gauges_are_read_when_requested() -> None:
    metrics = Metrics()
    stats = [EngineStats(2, 3, 8, 1, 0.25, 99, 0, 3)]
    metrics.bind("m", lambda: stats[-1], lambda: {"hits": 7, "misses": 2, "fetched": 1, "corrupt": 1}, device="cpu")
    found = samples(metrics, ready=True)
    assert found[("llmc:num_requests_running",)] == 2
    assert found[("llmc:num_requests_waiting",)] == 3
    assert found[("llmc:kv_cache_usage_perc",)] == 0.25
    assert found[("llmc:unplanned_compile_total",)] == 0
    assert found[("llmc:compilations_at_open_total",)] == 3
    assert found[("llmc:ready",)] == 1
    assert found[("llmc:build_info", "cpu", __version__)] == 1
    cache = {event: found[(f"llmc:artifact_cache_{event}_total",)] for event in ("hits", "misses", "corrupt")}
    assert cache == {"hits": 7, "misses": 2, "corrupt": 1}
    stats.append(EngineStats(0, 0, 8, 1, 0.0, 100, 4))
    found = samples(metrics)
    assert found[("llmc:num_requests_running",)] == 0
    assert found[("llmc:unplanned_compile_total",)] == 4
    assert found[("llmc:ready",)] == 0


def test_answers_count_by_route_and_status() -> None:
    metrics = Metrics()
    for status in (200, 200, 503):
        metrics.http("/v1/completions", status)
    found = samples(metrics)
    assert found[("llmc:http_requests_total", "/v1/completions", "200")] == 2
    assert found[("llmc:http_requests_total", "/v1/completions", "503")] == 1


def test_a_device_that_runs_any_shape_makes_no_endless_labels() -> None:
    metrics = Metrics()
    metrics.bind("m", lambda: None, plan=toy_plan())
    for context in range(1, 32):
        metrics.stepped(step(batch=3, context=context, padding_tokens=0))
    metrics.stepped(step(batch=3, context=1000))
    found = {labels[1]: n for labels, n in samples(metrics).items() if labels[0] == "llmc:bucket_steps_total"}
    assert found == {"4x1+16": 16, "4x1+32": 15, "other": 1}


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4"),
        ("text/plain;version=1.0.0;escaping=allow-utf-8", "text/plain; version=0.0.4"),
        (
            "application/openmetrics-text; version=1.0.0, text/plain;q=0.5",
            "application/openmetrics-text; version=1.0.0",
        ),
        (
            "application/openmetrics-text;version=1.0.0;escaping=underscores",
            "application/openmetrics-text; version=1.0.0",
        ),
    ],
)
def test_names_are_the_same_in_every_format(accept: str, content_type: str) -> None:
    text, found = Metrics("m").render(accept)
    assert found.startswith(content_type)
    assert 'llmc:prompt_tokens_total{model_name="m"} 0' in text.decode()
    assert text.decode().endswith("# EOF\n") == content_type.startswith("application/openmetrics-text")
    assert "llmc_" not in text.decode()


@pytest.fixture
def _eager_threads() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_eager_threads")
def test_scrapes_beside_the_engine_see_whole_steps() -> None:
    metrics = Metrics()
    metrics.bind("m", lambda: None, plan=toy_plan())
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            for context in (16, 32):
                metrics.stepped(step(context=context))
                metrics.finished(summary(finish_reasons=("stop", "stop")))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(20):
            found = samples(metrics)
            steps = sum(n for labels, n in found.items() if labels[0] == "llmc:bucket_steps_total")
            assert found[("llmc:iteration_tokens_total_count",)] == steps
            assert found[("llmc:request_success_total", "stop")] == 2 * found[("llmc:request_params_n_count",)]
    finally:
        stop.set()
        thread.join()


def test_counts_of_a_real_run(tmp_path) -> None:
    kept, metrics = Kept(), Metrics()
    bundle = toy_bundle(tmp_path)
    built = engine(bundle, Observers([kept, metrics]))
    metrics.bind("toy", lambda: built.stats, plan=bundle.plan)
    run(built, ["one", "another one", "a third, longer one", "four", "and five"], cancelled=["3"])
    found = samples(metrics)
    assert len(kept.summaries) == 5
    assert found[("llmc:generation_tokens_total",)] == sum(s.output_tokens for s in kept.summaries)
    assert found[("llmc:request_success_total", "length")] == 4
    assert found[("llmc:request_success_total", "abort")] == 1
    assert found[("llmc:e2e_request_latency_seconds_count",)] == 5
    admitted = [s for s in kept.summaries if s.queue_s is not None]
    assert found[("llmc:prompt_tokens_total",)] == sum(s.prompt_tokens for s in admitted)
    assert found[("llmc:prefix_cache_hits_total",)] == sum(s.cached_tokens for s in admitted)
    emitted = [s for s in kept.summaries if s.output_tokens]
    assert found[("llmc:time_to_first_token_seconds_count",)] == len(emitted)
    for phase in ("prompt", "decode"):
        of = [s for s in kept.steps if s.phase == phase]
        rows = {labels[1]: n for labels, n in found.items() if labels[::2] == ("llmc:bucket_requests_total", phase)}
        assert rows == {b: sum(s.live_rows for s in of if s.bucket == b) for b in {s.bucket for s in of}}
        assert found[("llmc:padding_tokens_total", phase)] == sum(s.padding_tokens for s in of)
    assert found[("llmc:num_requests_running",)] == found[("llmc:num_requests_waiting",)] == 0
    assert found[("llmc:unplanned_compile_total",)] == 0


def test_traffic_is_read_from_what_a_server_exports(tmp_path: Path) -> None:
    metrics = Metrics("m")
    for prompt, output in ((5, 2), (700, 30), (7, 1)):
        metrics.finished(summary(prompt_tokens=prompt, output_tokens=output))
    path = tmp_path / "metrics"
    path.write_bytes(metrics.render()[0])
    found = Trace(path).lengths
    assert found is not None
    assert (found.prompt.number, found.prompt.total) == (3, 712)
    assert (found.output.number, found.output.total) == (3, 33)


def test_prompts_of_another_device_are_counted_by_what_moving_them_cost() -> None:
    metrics = Metrics("m")
    metrics.handed_over(KVTransfer(7, 0, 1000, 0.1, 0.5, 0.001, 0.002, 0.25, 0.003))
    metrics.stepped(replace(step(), executable=HANDED_OVER))
    found = samples(metrics)
    assert found["llmc:kv_transfer_prompts_total",] == 1 and found["llmc:kv_transfer_bytes_total",] == 1000
    moved, waited = (histogram(found, f"llmc:kv_transfer_{name}_seconds") for name in ("time", "wait"))
    assert moved["sum"] == pytest.approx(0.006) and waited["sum"] == 0.25
    assert found["llmc:iteration_tokens_total_count",] == 0, "no bucket ran"
