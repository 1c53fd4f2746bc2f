"""`llmc warmup` as typed on a host with an NVIDIA card, which is a fake (tests/fakes/cuda)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.runtime.executors.inductor import executor as module
from llmc.testing.executors import PLAN
from tests.cli.helpers import Llmc
from tests.fakes import cuda, gaudi
from tests.fakes.cuda.state import Gpu
from tests.tiers import full

pytestmark = full

MEMORY = 64 << 20
WARMUP = ("warmup", "--no-compile")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gaudi.write_bundle(tmp_path_factory.mktemp("inductor"), "inductor")


@pytest.fixture
def accelerator(llmc: Llmc, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """After the environment of whoever runs the tests is gone; nothing is compiled, which takes seconds."""
    monkeypatch.setattr(module, "whole_graph", lambda run: run)
    return cuda.install(monkeypatch, memory=MEMORY)


def test_memory_is_divided_and_graphs_are_captured_within_their_budget(
    llmc: Llmc, bundle: Path, accelerator: Gpu
) -> None:
    found = llmc(*WARMUP, bundle, "--gpu-memory-utilization", "0.8", "--graph-reserved-mem", "0.4", "--json").json
    assert found["device"] == "inductor"
    assert found["memory"]["total"] == MEMORY
    assert found["memory"]["usable"] == int(found["memory"]["free"] * 0.8)
    assert found["compilations"] == []
    graphs = found["graphs"]
    assert 0 < graphs["used"] <= graphs["budget"]
    assert sum(len(graphs[phase]["captured"]) for phase in ("prompt", "decode")) == len(PLAN.buckets)


def test_what_finds_no_room_is_named_and_runs(llmc: Llmc, bundle: Path, accelerator: Gpu) -> None:
    found = llmc(*WARMUP, bundle, "--graph-reserved-mem", "0.06", "--json").json
    uncaptured = [one for phase in ("prompt", "decode") for one in found["graphs"][phase]["uncaptured"]]
    assert uncaptured and all("does not fit: about" in one["why"] for one in uncaptured)
    assert sum(found["phases"][phase]["warm"] for phase in ("prompt", "decode")) == len(PLAN.buckets)


def test_an_eager_run_captures_nothing(llmc: Llmc, bundle: Path, accelerator: Gpu) -> None:
    failed = llmc(*WARMUP, bundle, "--enforce-eager", "--graph-reserved-mem", "0.4").failed(2)
    assert failed.startswith("--graph-reserved-mem: inductor captures no graphs")


def test_a_certificate_sees_no_compilation_once_graphs_are_captured(
    llmc: Llmc, bundle: Path, accelerator: Gpu, here: Path
) -> None:
    assert llmc(*WARMUP, bundle, "--certify", "c.json", "--requests", "3").code == 0
    reported = json.loads((here / "c.json").read_text())["certificate"]["monitors"]
    assert all(one["after"]["count"] == 0 for one in reported if "after" in one and "torch" in one["monitor"])
