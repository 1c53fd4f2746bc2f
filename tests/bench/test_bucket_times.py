"""Measuring buckets: every bucket of the plan, through the executor that serves."""

from __future__ import annotations

from pathlib import Path

import pytest

import llmc
from llmc.bench.bucket_times import LEAST_SAMPLES, MOST_SAMPLES, SLOW, enough, measure
from llmc.buckets.cost.bench import Bench
from llmc.runtime.bundle import Bundle
from tests.toy import Toy


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    toy = Toy.make(tmp_path_factory.mktemp("toy"))
    toy.compile()
    return toy


def test_every_bucket_is_measured_and_reported(toy: Toy) -> None:
    seen = []
    found = measure(Bundle.open(toy.bundle), seconds=0.0, report=lambda bucket, took, *index: seen.append(index))
    assert [one.bucket for one in found.measurements] == list(toy.plan.buckets)
    assert all(one.seconds > 0 and one.samples == LEAST_SAMPLES for one in found.measurements)
    assert seen == [(i, len(toy.plan.buckets)) for i in range(1, len(toy.plan.buckets) + 1)]
    assert found.device == "fake"


def test_a_measured_bundle_reads_back(toy: Toy, tmp_path: Path) -> None:
    found = measure(Bundle.open(toy.bundle), seconds=0.0)
    found.save(tmp_path / "bench.json")
    assert Bench.load(tmp_path / "bench.json").to_json() == found.to_json()
    again = llmc.measure(str(toy.bundle), seconds=0.0, threads=1)
    assert [one.bucket for one in again.measurements] == [one.bucket for one in found.measurements]


def test_more_time_takes_more_samples(toy: Toy) -> None:
    found = measure(Bundle.open(toy.bundle), seconds=60.0)
    assert all(one.samples == MOST_SAMPLES for one in found.measurements)


def test_the_first_run_does_not_count() -> None:
    assert not enough([], 0.0)
    assert not enough([9.0], 0.0)
    assert not enough([9.0] + [0.001] * (LEAST_SAMPLES - 1), 0.0)
    assert enough([9.0] + [0.001] * LEAST_SAMPLES, 0.0)
    assert not enough([9.0] + [0.01] * LEAST_SAMPLES, 0.3)
    assert enough([9.0] + [0.01] * 30, 0.3)
    assert enough([9.0] + [0.001] * MOST_SAMPLES, 60.0)
    assert enough([0.1, SLOW * 2], 0.3)
