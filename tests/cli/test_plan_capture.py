"""`llmc plan capture`: which graphs a device of some memory would hold, and budgets that hold none."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan, Provenance
from llmc.compiler.architectures.shared.architectures import architecture
from llmc.compiler.architectures.shared.caches import cache_of
from tests.buckets.capture.simulated import GUIDE
from tests.cli.helpers import Llmc

LOGGED = (
    "--device-memory", "94.622GiB", "--weight-memory", "14.97GiB", "--profile-memory", "504MiB",
    "--kv-bytes-per-token", "128KiB", "--graph-bytes-per-token", "1.44MiB", "--gpu-memory-utilization", "50%",
    "--graph-reserved-mem", "0.4", "--graph-prompt-ratio", "0.5",
)  # fmt: skip
"""The guide's logged run."""


@pytest.fixture
def plan(here: Path) -> str:
    Plan(Limits(2048, 4, 8192, 128, 1024), tuple(GUIDE), Provenance("linear")).save("plan.json")
    return "plan.json"


def test_the_guides_run_before_there_is_a_device(llmc: Llmc, plan: str) -> None:
    ran = llmc("plan", "capture", plan, *LOGGED)
    assert ran.code == 0, ran
    assert "KV cache: 1,519 blocks, 194,432 tokens  23.73 GiB" in ran.out
    assert "Using 15.85 GiB/55.43 GiB of free device memory for graphs, 7.923 GiB for prompt" in ran.out
    assert "Graph/Prompt captured:15 (62.5%) used_mem:14.04 GiB buckets:[(1, 128)" in ran.out
    assert "Graph/Decode captured:48 (100.0%)" in ran.out
    assert ran.out.splitlines()[-1] == "runs uncaptured: 4 more prompt buckets"


def test_with_v_every_graph_has_its_line_and_every_other_bucket_its_reason(llmc: Llmc, plan: str) -> None:
    ran = llmc("plan", "capture", plan, *LOGGED, "-v")
    assert "[Warmup][Graph/Prompt][12/24] batch_size:4 seq_len:256" in ran.err
    assert ran.out.count("runs uncaptured: prompt") == 9


def test_json_names_memory_and_all_buckets(llmc: Llmc, plan: str) -> None:
    found = json.loads(llmc("plan", "capture", plan, *LOGGED, "--json").out)
    assert found["memory"]["kv_blocks"] == 1519
    assert (len(found["prompt"]["captured"]), len(found["prompt"]["uncaptured"])) == (15, 9)


def test_a_model_gives_the_sizes_and_the_environment_the_shares(
    llmc: Llmc, plan: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (here / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("VLLM_GRAPH_RESERVED_MEM", "0.3")
    found = json.loads(
        llmc("plan", "capture", plan, "--device-memory", "96GiB", "--model", "config.json", "--json").out
    )
    memory = found["memory"]
    assert memory["weights"] == pytest.approx(14.96 * 2**30, rel=0.001)
    assert memory["graphs"] == int(memory["usable"] * 0.3)
    assert memory["kv_cache"] == memory["kv_blocks"] * 16 * 2**20
    taken = [one["bytes"] / (one["bucket"][0] * one["bucket"][1]) for one in found["prompt"]["captured"]]
    assert taken == pytest.approx([1.432 * 2**20] * len(taken), rel=0.001)
    assert len(taken) > 15


def test_a_block_has_its_share_of_what_a_sequence_keeps(llmc: Llmc, plan: str, here: Path) -> None:
    config = {"model_type": "bamba", "vocab_size": 257, **architecture({"model_type": "bamba"}).tiny}
    (here / "config.json").write_text(json.dumps(config))
    memory = json.loads(
        llmc("plan", "capture", plan, "--device-memory", "1GiB", "--model", "config.json", "--json").out
    )["memory"]
    limits, cache = Plan.load(plan).limits, cache_of(config)
    assert cache.states and cache.kv
    each = cache.nbytes(limits.max_model_len, "bf16") * limits.block_size / limits.max_model_len
    assert memory["kv_cache"] == memory["kv_blocks"] * math.ceil(each)


def test_with_traffic_the_share_of_steps_that_replay_a_graph_is_reported(llmc: Llmc, plan: str, here: Path) -> None:
    minutes = [f"2023-11-16 18:{minute}:00,{tokens},2" for minute, tokens in enumerate((100, 100, 100, 1000), 10)]
    (here / "requests.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *minutes, ""]))
    alone = ("--graph-prompt-ratio", "1", "--graph-reserved-mem", "0.02", "--traffic", "requests.csv")
    ran = llmc("plan", "capture", plan, *LOGGED, *alone)
    assert ran.code == 0, ran
    assert "requests.csv: 75.0% of prompt steps and 100.0% of decode steps replay a graph" in ran.out
    found = json.loads(llmc("plan", "capture", plan, *LOGGED, *alone, "--json").out)
    assert found["steps_captured"] == {"prompt": 0.75, "decode": 1.0}


def test_a_budget_too_small_for_one_graph_says_what_one_takes(llmc: Llmc, plan: str) -> None:
    """Without decode graphs, which are small, by a size of them that is as large as a prompt's."""
    little = ("--graph-bytes-per-token", "20GiB", "--graph-reserved-mem", "0.4")
    said = llmc("plan", "capture", plan, *LOGGED, *little).failed(2)
    assert said == (
        "no graph fits in 15.85 GiB: the smallest, decode[1x1+128], takes about 20 GiB; raise --graph-reserved-mem "
        "or --gpu-memory-utilization, or run without graphs (--graph-reserved-mem 0)"
    )


def test_no_memory_for_graphs_is_a_choice(llmc: Llmc, plan: str) -> None:
    ran = llmc("plan", "capture", plan, *LOGGED, "--graph-reserved-mem", "0")
    assert ran.code == 0
    assert "Graph/Decode captured:0 (0.0%) used_mem:0 B buckets:[]" in ran.out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--graph-prompt-ratio", "1.5"), "--graph-prompt-ratio 1.5 is not within 0 … 1; give a share such as 0.3"),
        (("--graph-reserved-mem", "lots"), "--graph-reserved-mem 'lots' is not a fraction such as 0.1 or 10%"),
        (("--device-memory", "96 bananas"), "--device-memory '96 bananas' is not a size such as 512MiB or 8GB"),
        (("--decode-strategy", "fast"), "unknown order of graph capture (--decode-strategy, "
         "VLLM_GRAPH_DECODE_STRATEGY) 'fast'; known: max_bs, min_tokens"),
        (("--device-memory", "8GiB"), "8 GiB of device memory cannot hold 14.97 GiB of weights and 504 MiB of the "
         "profile run; quantise the model, or take more devices"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(llmc: Llmc, plan: str, flags: tuple[str, ...], said: str) -> None:
    assert llmc("plan", "capture", plan, *LOGGED, *flags).failed(2) == said


def test_without_a_model_all_sizes_are_needed(llmc: Llmc, plan: str) -> None:
    said = llmc("plan", "capture", plan, "--device-memory", "96GiB", "--weight-memory", "15GiB").failed(2)
    assert said.startswith("sizes are missing: give --model MODEL to estimate them, or --weight-memory")
