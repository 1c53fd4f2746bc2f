"""`llmc warmup` as typed, on a device that captures graphs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.buckets.bucket import Bucket
from llmc.buckets.plan import Plan
from llmc.errors import OutOfDeviceMemoryError
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors.fake.executor import FakeGraphDevice
from tests.cli.helpers import Llmc
from tests.toy import Toy

MEMORY = 150_000


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    toy = Toy.make(tmp_path_factory.mktemp("graphs"))
    toy.compile(device=f"fake:graphs={MEMORY}", verify="none")
    return toy.bundle


@pytest.fixture
def plan(bundle: Path) -> Plan:
    return Bundle.open(bundle).plan


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException, batch: int) -> None:
    """The device raises `error` where it is to capture a bucket of that batch."""
    honest = FakeGraphDevice.capture

    def capture(self: FakeGraphDevice, bucket: Bucket) -> int:
        if bucket.batch == batch:
            raise error
        return honest(self, bucket)

    monkeypatch.setattr(FakeGraphDevice, "capture", capture)


def test_memory_is_divided_graphs_are_captured_and_the_rest_is_named(llmc: Llmc, bundle: Path, plan: Plan) -> None:
    found = llmc("warmup", bundle, "--graph-reserved-mem", "0.15", "--json").json
    memory, graphs = found["memory"], found["graphs"]
    assert memory["total"] == MEMORY
    assert memory["weights"] + memory["profile_run"] + memory["free"] == MEMORY
    assert memory["kv_cache"] <= 0.85 * memory["usable"]
    assert 0 < graphs["used"] <= graphs["budget"]
    for phase, buckets in (("prompt", plan.prompt), ("decode", plan.decode)):
        named = [one["bucket"] for kind in ("captured", "uncaptured") for one in graphs[phase][kind]]
        assert sorted(named) == [[b.batch, b.query, b.context] for b in sorted(buckets)]
        assert graphs[phase]["captured"] and all(one["bytes"] > 0 for one in graphs[phase]["captured"])
        assert all(one["why"] for one in graphs[phase]["uncaptured"])
        assert found["phases"][phase]["warm"] == len(buckets), "uncaptured ones run all the same"
    assert found["free_memory"]["after"] == graphs["free"] - graphs["used"]


def test_the_report_is_the_guides_table_and_lines(llmc: Llmc, bundle: Path) -> None:
    ran = llmc("warmup", bundle, "-q", "--graph-reserved-mem", "0.15")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("free device memory: "))
    table, graphs = lines[at + 2 : at + 8], lines[at + 9 :]
    assert [line.split(" ")[0] for line in table] == ["", "weights", "profile", "KV", "graphs", "margin,"]
    assert graphs[0].endswith("(VLLM_GRAPH_PROMPT_RATIO=0.3)")
    assert graphs[1].startswith("Graph/Prompt captured:") and graphs[2].startswith("Graph/Decode captured:")
    assert graphs[3:] and all(line.startswith("runs uncaptured: ") for line in graphs[3:])


def test_flags_choose_what_is_captured_first(llmc: Llmc, bundle: Path) -> None:
    def first(*flags: str) -> tuple[list[int], list[int]]:
        found = llmc("warmup", bundle, "--graph-reserved-mem", "0.9", *flags, "--json").json["graphs"]
        return tuple(found[phase]["captured"][0]["bucket"] for phase in ("prompt", "decode"))

    assert first() == ([1, 4, 0], [4, 1, 16])
    assert first("--decode-strategy", "min_tokens") == ([1, 4, 0], [1, 1, 8])
    assert first("--prompt-strategy", "max_bs") == ([4, 4, 0], [4, 1, 16])


def test_variables_count_where_no_flag_is_given(llmc: Llmc, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_GRAPH_RESERVED_MEM", "0")
    none, some = (llmc("warmup", bundle, *f, "--json").json for f in ((), ("--graph-reserved-mem", "0.4")))
    assert (none["graphs"]["budget"], none["memory"]["graphs"]) == (0, 0)
    assert some["graphs"]["used"] > 0


def test_where_no_graph_fits_the_exit_code_is_1_with_what_one_takes(llmc: Llmc, bundle: Path) -> None:
    ran = llmc("warmup", bundle, "-q", "--graph-reserved-mem", "0.0001")
    assert ran.code == 1
    assert ran.err.startswith(f"llmc: error: {bundle}: no graph fits in 0 B: the smallest, prompt[1x4+0], takes")
    assert "Graph/Decode captured:0 (0.0%)" in ran.out


def test_out_of_memory_in_the_middle_is_said_and_what_is_captured_stays(
    llmc: Llmc, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, OutOfDeviceMemoryError("synStatus 26"), batch=2)
    ran = llmc("warmup", bundle, "-q", "--graph-reserved-mem", "0.4")
    assert ran.code == 0
    assert "Graph/Prompt captured:3 (50.0%)" in ran.out
    assert ran.out.splitlines()[-1].startswith("the device ran out of memory while capturing prompt[2x8+8]; lower")


def test_out_of_memory_at_the_first_graph_fails(llmc: Llmc, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, OutOfDeviceMemoryError("synStatus 26"), batch=1)
    ran = llmc("warmup", bundle, "-q", "--graph-reserved-mem", "0.4")
    assert ran.code == 1
    assert "no graph was captured: the device ran out of memory while capturing prompt[1x4+0]" in ran.err


def test_an_interrupt_while_capturing_shows_what_is_captured(
    llmc: Llmc, bundle: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, KeyboardInterrupt(), batch=2)
    ran = llmc("warmup", bundle, "--json", "-q", "--graph-reserved-mem", "0.4")
    assert ran.code == 130
    assert f"not warmed up: {len(plan.buckets)} of {len(plan.buckets)} buckets" in ran.err
    found = json.loads(ran.out)
    assert found["interrupted"] and len(found["graphs"]["prompt"]["captured"]) == 3


def test_a_model_that_leaves_no_cache_is_one_line(llmc: Llmc, bundle: Path) -> None:
    said = llmc("warmup", bundle, "--gpu-memory-utilization", "0.01").failed(2)
    assert "one sequence of 33 tokens needs 5: raise --gpu-memory-utilization" in said


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--graph-reserved-mem", "1.5", "--graph-reserved-mem 1.5 is not within 0 … 1"),
        ("--gpu-memory-utilization", "all", "--gpu-memory-utilization 'all' is not a fraction"),
        ("--prompt-strategy", "max", "unknown order of graph capture"),
    ],
)
def test_flags_out_of_range_are_refused(llmc: Llmc, bundle: Path, flag: str, value: str, said: str) -> None:
    assert said in llmc("warmup", bundle, flag, value).failed(2)


def test_a_flag_for_a_device_that_captures_none_is_refused_and_a_variable_is_not(
    llmc: Llmc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = Toy.make(tmp_path)
    toy.compile(verify="none")
    other = toy.bundle
    said = llmc("warmup", other, "--decode-strategy", "max_bs").failed(2)
    assert said == "--decode-strategy: fake captures no graphs, so there is no memory to divide; leave it out"
    monkeypatch.setenv("VLLM_GRAPH_RESERVED_MEM", "0.4")
    assert "graphs" not in llmc("warmup", other, "--json").json
