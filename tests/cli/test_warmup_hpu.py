"""`llmc warmup` as typed on a Gaudi host, whose card is a fake (tests/fakes/habana_frameworks)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmc.runtime.executors.compilations import CompilationCounter
from llmc.testing.executors import PLAN
from tests.cli.helpers import Llmc
from tests.fakes import gaudi
from tests.tiers import full

pytestmark = full

MEMORY = 16 << 20
WARMUP = ("warmup", "--no-compile")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gaudi.write_bundle(tmp_path_factory.mktemp("hpu"))


@pytest.fixture
def accelerator(llmc: Llmc, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A card in lazy mode, after the environment of whoever runs the tests is gone."""
    return gaudi.install(monkeypatch, lazy=True, FAKE_HPU_MEMORY=str(MEMORY))


def test_memory_is_divided_hpu_graphs_are_captured_and_nothing_compiles_afterwards(
    llmc: Llmc, bundle: Path, accelerator: Any
) -> None:
    found = llmc(*WARMUP, bundle, "--graph-reserved-mem", "0.4", "--json").json
    assert found["device"] == "hpu"
    assert found["memory"]["total"] == MEMORY
    assert found["compilations"] == []
    assert {f"hpu: {b.phase} batch={b.batch} query={b.query} context={b.context}" for b in PLAN.buckets} <= set(
        found["compilations_at_open"]
    )
    graphs = found["graphs"]
    assert 0 < graphs["used"] <= graphs["budget"]
    assert sum(len(graphs[phase]["captured"]) for phase in ("prompt", "decode")) == len(PLAN.buckets)
    assert all(graph["bytes"] > 0 for phase in ("prompt", "decode") for graph in graphs[phase]["captured"])


def test_what_finds_no_room_is_named_and_runs(llmc: Llmc, bundle: Path, accelerator: Any) -> None:
    found = llmc(*WARMUP, bundle, "--graph-reserved-mem", "0.05", "--json").json
    uncaptured = [one for phase in ("prompt", "decode") for one in found["graphs"][phase]["uncaptured"]]
    assert uncaptured and all("does not fit: about" in one["why"] for one in uncaptured)
    assert sum(found["phases"][phase]["warm"] for phase in ("prompt", "decode")) == len(PLAN.buckets)


def test_an_eager_run_captures_nothing(llmc: Llmc, bundle: Path, accelerator: Any) -> None:
    found = llmc(*WARMUP, bundle, "--enforce-eager", "--json").json
    assert found.get("graphs") is None
    assert (
        llmc(*WARMUP, bundle, "--enforce-eager", "--graph-reserved-mem", "0.4")
        .failed(2)
        .startswith("--graph-reserved-mem: hpu captures no graphs")
    )


def test_a_certificate_rests_on_the_accelerators_own_counter(
    llmc: Llmc, bundle: Path, accelerator: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert llmc(*WARMUP, bundle, "--certify", "c.json", "--requests", "3").code == 0
    reported = json.loads((here / "c.json").read_text())["certificate"]["monitors"]
    seen = {one["monitor"]: one for one in reported}["hpu.metrics graph_compilation"]
    assert (seen["before"]["count"] > 0, seen["after"]["count"]) == (True, 0)

    ready = CompilationCounter.ready

    def forgets(self: CompilationCounter) -> None:
        ready(self)
        accelerator.accelerator().recipes.clear()

    monkeypatch.setattr(CompilationCounter, "ready", forgets)
    failed = llmc(*WARMUP, bundle, "--certify", "d.json", "--requests", "3")
    assert failed.code == 1
    assert "hpu.metrics graph_compilation" in failed.out + failed.err
