"""vLLM's high-level profile: its events, its counters, whole after a close and readable before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmc.errors import InputError
from llmc.server.telemetry.vllm_trace import VllmTrace
from tests.server.telemetry.samples import generator, run, step, toy_bundle


def traced(path: Path, *steps: Any) -> list[dict[str, Any]]:
    trace = VllmTrace(path, clock=lambda: 100.0, wall=lambda: 1_000.0)
    for one in steps:
        trace.stepped(one)
    trace.close()
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return events[:-1]


def test_a_step_is_what_vllm_draws_of_it(tmp_path: Path) -> None:
    decode = step(started_s=100.0, lengths=(10, 3, 5))
    counters, prepare, execute, graph, sample = traced(tmp_path / "t.json", decode)
    assert (counters["ph"], counters["tid"], counters["name"]) == ("C", 1, "utils")
    assert [e["name"] for e in (prepare, execute, graph, sample)] == [
        "prepare_input_tensors", "execute_model", "model_decode_bs4_seq16_graphsT", "sample",
    ]  # fmt: skip
    assert all((e["ph"], e["tid"]) == ("X", 3) for e in (prepare, execute, graph, sample))
    assert prepare["ts"] == pytest.approx(1_000.001e6)
    assert [e["dur"] for e in (prepare, execute, graph, sample)] == pytest.approx([2e3, 6e3, 6e3, 1e3])
    assert execute["ts"] == graph["ts"] == counters["ts"] == pytest.approx(prepare["ts"] + 2e3)
    assert counters["args"] == pytest.approx({
        "decode_bucket_batch_size": 4, "decode_batch_size": 3, "decode_bucket_seq_len": 16, "decode_seq_len": 10,
        "decode_bucket_gen_throughput": 4 / 0.006, "decode_real_gen_throughput": 3 / 0.006,
        "decode_batch_token_utilization": 18 / 64, "average_real_throughput": 500, "engine_iteration": 0,
    })  # fmt: skip


def test_prompts_have_their_own_throughputs_and_a_miss_no_graph(tmp_path: Path) -> None:
    prompt = step("prompt", 4, 8, 0, live_tokens=12, lengths=(8, 2, 2), miss=True)
    events = traced(tmp_path / "t.json", prompt, step(live_rows=1, lengths=(4,)))
    assert events[3]["name"] == "model_prompt_bs4_seq8_graphsF"
    assert events[0]["args"]["prompt_bucket_in_throughput"] == pytest.approx(32 / 0.006)
    assert events[0]["args"]["prompt_real_in_throughput"] == pytest.approx(12 / 0.006)
    assert events[0]["args"]["prompt_batch_token_utilization"] == pytest.approx(12 / 32)
    assert events[5]["args"]["engine_iteration"] == 1
    assert events[5]["args"]["average_real_throughput"] == pytest.approx((3 + 1) / 2 / 0.006)


def test_the_engine_tells_it_how_long_its_sequences_are(tmp_path: Path) -> None:
    trace = VllmTrace(tmp_path / "t.json")
    run(generator(toy_bundle(tmp_path), trace), ["abc", "hello"], max_tokens=3)
    trace.close()
    counters = [e["args"] for e in json.loads((tmp_path / "t.json").read_text()) if e["ph"] == "C"]
    assert counters[0]["prompt_seq_len"] == 5
    assert [c["decode_seq_len"] for c in counters if "decode_seq_len" in c] == [6, 7]


def test_a_folder_that_takes_no_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write the high-level profile"):
        VllmTrace(tmp_path / "missing" / "t.json")
