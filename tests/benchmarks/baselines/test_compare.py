"""A comparison of fake engines: every measurement, in turn, with what fails left out and said."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from baselines import compare, machine
from baselines.compare import OF_ROOFLINE
from baselines.report_text import text
from baselines.results import Comparison
from baselines.rounds import ROOM, settings
from baselines.scope import KINDS, Scope
from baselines.worker import Contender

from llmc.cli.output import sigterm_interrupts
from llmc.errors import DeviceError, InputError, UnknownNameError
from tests.tiers import full

Make = Callable[..., Contender]
TRACE = Path(__file__).parents[2] / "data" / "azure_conv_sample.csv"
SMALL = Scope(
    kinds=KINDS, rounds=2, batches=(1, 8), prompts=(512, 2048), steps=2, first_token_rounds=1, streams=(1, 8),
    stream_tokens=4, trace=TRACE, trace_rounds=2, requests=3, concurrency=2, max_len=128,
)  # fmt: skip


@pytest.fixture(autouse=True)
def quick_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 16)


def run(contenders: list[Contender], scope: Scope, folder: Path, **more: object) -> tuple[Comparison, list[str]]:
    reported: list[str] = []

    def progress(words: str, done: int, total: int) -> None:
        reported.append(f"{done}/{total} {words}")

    found = compare.run(
        contenders, scope, model="m", threads=1, vocabulary=5, logs=folder / "logs", progress=progress,
        reference=more.get("reference"), texts=more.get("texts", [[1] * 12, [2] * 9]), weights=1000,  # type: ignore[arg-type]
    )  # fmt: skip
    return found, reported


@full
def test_every_measurement_is_built_of_every_contender(contender: Make, tmp_path: Path) -> None:
    ours, baseline = contender("llmc", "llmc"), contender("baseline", step_ms=4.0)
    found, reported = run([ours, baseline], SMALL, tmp_path, reference=contender("f32"))
    assert [s.name for s in found.series] == [
        "decode step, batch 1", "decode step, batch 8", "prefill of 512 tokens", "prefill of 2,048 tokens",
        "process start to first token", "memory (PSS), 8 streams of 256 + 4 tokens", "1 stream of 64 + 4 tokens",
        "8 streams of 64 + 4 tokens", "recorded lengths, 2 at a time: throughput",
        "recorded lengths, 2 at a time: p95 between tokens", "recorded lengths, 2 at a time: p50 between tokens",
        "recorded lengths, 2 at a time: p95 to the first token",
    ]  # fmt: skip
    for series in found.series:
        assert set(series.rounds) == {"llmc", "baseline"}, series
        assert not series.missing
    decode = found.series[0]
    assert decode.rounds == {"llmc": [2.0, 2.0], "baseline": [4.0, 4.0]}
    assert found.ratios(decode)[0].median == 0.5
    assert found.contenders[0].versions == {"fake": "1"}
    assert reported[-1].split()[0] == f"{len(reported)}/{len(reported)}"


def test_quality_is_measured_against_the_reference(contender: Make, tmp_path: Path) -> None:
    ours, baseline = contender("llmc", "llmc", "small"), contender("baseline")
    found, _ = run([ours, baseline], SMALL.only("quality"), tmp_path, reference=contender("f32"))
    assert 0 < found.quality["llmc"].mean_kl < 0.01
    assert found.quality["baseline"].mean_kl == 0
    assert found.quality["baseline"].tokens == 12 + 9 - 2 * 7, "the first seven of each text do not count"


def test_without_a_reference_quality_is_left_out_and_said(contender: Make, tmp_path: Path) -> None:
    found, _ = run([contender("llmc", "llmc")], SMALL.only("quality,prefill"), tmp_path)
    assert found.quality == {}
    assert found.notes == ["quality was not measured: there is no float32 reference or no text"]


def test_a_baseline_that_fails_is_left_out_of_what_it_fails_at(contender: Make, tmp_path: Path) -> None:
    ours, baseline = contender("llmc", "llmc"), contender("baseline", model="refuses")
    found, _ = run([ours, baseline], SMALL.only("decode,prefill"), tmp_path)
    decode, _, prefill, _ = found.series
    assert list(decode.rounds) == ["llmc"]
    assert "no batch of 1" in decode.missing["baseline"]
    assert set(prefill.rounds) == {"llmc", "baseline"}


def test_a_baseline_that_dies_or_does_not_open_does_not_end_the_comparison(contender: Make, tmp_path: Path) -> None:
    baselines = [contender("dying", model="dies"), contender("absent", model="does-not-open")]
    found, _ = run([contender("llmc", "llmc"), *baselines], SMALL.only("decode,prefill"), tmp_path)
    for series in found.series:
        assert list(series.rounds) == ["llmc"], series
    assert "exit code 7" in found.series[0].missing["dying"]
    assert "no such model" in found.series[0].missing["absent"]


def test_a_bundle_is_not_requested_more_than_it_was_compiled_for(contender: Make, tmp_path: Path) -> None:
    found, _ = run([contender("llmc", "llmc", "small")], SMALL.only("decode,prefill,memory"), tmp_path)
    assert [s.missing.get("llmc") for s in found.series] == [
        None, "the bundle runs 4 sequences at a time", None, "the bundle takes prompts of 600 tokens",
        "the bundle runs 4 sequences at a time",
    ]  # fmt: skip


def test_nothing_of_ours_at_all_is_an_error(contender: Make, tmp_path: Path) -> None:
    ours = contender("llmc", "llmc", "does-not-open")
    with pytest.raises(DeviceError, match=r"no measurement of llmc succeeded: .*no such model"):
        run([ours, contender("baseline")], SMALL.only("decode"), tmp_path)


def test_decode_steps_are_held_against_the_roofline(contender: Make, tmp_path: Path) -> None:
    """1,000 weights of 4 bits at the bandwidth that was measured."""
    found, _ = run([contender("llmc", "llmc", bits=4)], SMALL.only("decode"), tmp_path)
    assert found.bandwidth is not None
    share = found.series[0].shares["llmc"][OF_ROOFLINE]
    assert share == pytest.approx(500 / found.bandwidth / 2e-3)


def test_what_is_outside_the_graphs_is_reported(contender: Make, tmp_path: Path) -> None:
    found, _ = run([contender("llmc", "llmc"), contender("baseline")], SMALL.only("decode,streams"), tmp_path)
    assert found.series[0].shares["llmc"]["outside the graphs"] == pytest.approx(0.1)
    assert found.series[2].shares["llmc"]["outside the graphs"] == pytest.approx(0.1)
    assert found.series[2].shares["llmc"]["of the same steps replayed bare"] == pytest.approx(0.8)
    assert "baseline" not in found.series[2].shares


def test_recorded_requests_are_others_in_each_round(contender: Make, tmp_path: Path) -> None:
    found, _ = run([contender("llmc", "llmc")], SMALL.only("trace"), tmp_path)
    rate, gap, middle, first = (s.rounds["llmc"] for s in found.series)
    assert rate[0] != rate[1], "other lengths, other counts of tokens"
    assert gap == pytest.approx([10, 10]) and middle == pytest.approx([10, 10])
    assert first == pytest.approx([400, 400])


@full
def test_the_order_of_engines_turns_each_round_and_is_recorded(contender: Make, tmp_path: Path) -> None:
    every = [contender("a", "llmc"), contender("b"), contender("c", model="refuses")]
    found, _ = run(every, replace(SMALL, rounds=3).only("decode,first-token"), tmp_path)
    decode, first = found.series[0], found.series[-1]
    assert decode.orders == [["b", "a"], ["a", "b"], ["a", "b"]], "c fails in the round that warms"
    assert first.orders == [["b", "c", "a"]]
    again, _ = run(every, replace(SMALL, rounds=3).only("decode,first-token"), tmp_path)
    assert [s.orders for s in again.series] == [s.orders for s in found.series]
    assert "note: the order of engines turns by one each round\n" in text(found)


def test_the_best_setting_of_a_baseline_is_searched_first_and_measured_with(contender: Make, tmp_path: Path) -> None:
    ours, baseline = (
        contender("llmc", "llmc"),
        contender("baseline", searched={"slower": (4, 0.5, 2), "prefetch": ("no",)}),
    )
    found, reported = run([ours, baseline], SMALL.only("prefill,streams,memory"), tmp_path)
    assert [(t.use, t.options["slower"], t.seconds, t.chosen) for t in found.tuning] == [
        ("latency", 4, pytest.approx(8.192), False), ("latency", 0.5, pytest.approx(1.024), True),
        ("latency", 2, pytest.approx(4.096), False), ("throughput", 4, 4.0, False), ("throughput", 0.5, 0.5, True),
        ("throughput", 2, 2.0, False),
    ]  # fmt: skip
    assert found.series[0].rounds["baseline"] == pytest.approx([256, 256]), "half of the 512 ms of its default"
    assert found.series[-1].rounds["baseline"] == pytest.approx([64, 64]), "twice its default's 32 tokens a second"
    assert reported[-1].split()[0] == f"{len(reported)}/{len(reported)}"
    assert run([ours, baseline], SMALL.only("memory"), tmp_path)[0].tuning == [], "memory is of the defaults"
    assert run([ours, baseline], SMALL.only("prefill").quick(), tmp_path)[0].tuning == []


def test_a_setting_that_fails_is_reported_and_another_taken(contender: Make, tmp_path: Path) -> None:
    baseline = contender("baseline", searched={"model": ("does-not-open", "model")})
    found, _ = run([contender("llmc", "llmc"), baseline], SMALL.only("prefill"), tmp_path)
    failed, taken = found.tuning
    assert "no such model" in failed.error and not failed.chosen and taken.chosen
    assert set(found.series[0].rounds) == {"llmc", "baseline"}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_measured_and_names_the_rest(contender: Make, tmp_path: Path, signum: int) -> None:
    """The engine sends the signal as it is asked for eight rows, and would be busy for ten minutes."""
    baseline = contender("baseline", interrupts={"rows": 8, "signal": signum})
    began = time.monotonic()
    with sigterm_interrupts():
        found, _ = run([contender("llmc", "llmc"), baseline], SMALL.only("quality,decode,first-token"), tmp_path)
    assert time.monotonic() - began < 300
    assert set(found.series[0].rounds) == {"llmc", "baseline"} and len(found.series[0].rounds["baseline"]) == 2
    assert found.unfinished == [
        "quality of llmc, baseline", "decode step, batch 8 in every round (llmc 0 of 2, baseline 0 of 2)",
        "process start to first token",
    ]  # fmt: skip
    assert "note: interrupted: process start to first token was not measured" in text(found)


def test_an_interrupt_before_anything_was_measured_is_one(contender: Make, tmp_path: Path) -> None:
    baseline = contender("baseline", interrupts={"rows": 1, "signal": signal.SIGINT})
    with pytest.raises(KeyboardInterrupt):
        run([baseline], SMALL.only("decode"), tmp_path)


def test_an_unknown_measurement_or_a_missing_trace_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="unknown measurement 'speed'; known: decode"):
        Scope().only("decode,speed")
    with pytest.raises(InputError, match="needs a file of request lengths: --traffic FILE"):
        Scope().only("trace")


def test_quick_measures_the_same_with_fewer_rounds() -> None:
    scope = Scope()
    quick = scope.quick()
    assert quick.kinds == scope.kinds and quick.batches == scope.batches
    assert quick.rounds < scope.rounds


def test_engines_with_fixed_caches_are_reported_their_sizes(contender: Make) -> None:
    built = contender("one")
    llama, openvino = replace(built, engine="llama"), replace(built, engine="openvino_pipeline")
    assert settings(llama, sequences=4, length=64 + ROOM) == {"sequences": 4, "length": 64 + ROOM}
    assert settings(openvino, sequences=4, length=64, batched_tokens=99) == {"batched_tokens": 99}
    assert settings(openvino, sequences=4, length=64) == {} == settings(built, sequences=4, length=64)
