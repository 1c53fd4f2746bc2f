"""Planning from recorded traffic and evaluating plans, as typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.buckets.plan import Plan
from tests.buckets.traffic.formats.logs import scrape
from tests.cli.helpers import Llmc
from tests.tiers import full

SAMPLE = Path(__file__).parents[1] / "data" / "azure_conv_sample.csv"
LENGTH = ("--max-model-len", 8192, "--max-num-seqs", 1)
SHORT = "time,prompt_tokens,output_tokens\n" + "".join(f"{i},{3 + i % 9},5\n" for i in range(50))


def test_a_plan_from_traffic_says_what_to_expect(llmc: Llmc) -> None:
    ran = llmc("plan", *LENGTH, "--traffic", SAMPLE, "--max-graphs", 12, "-o", "plan.json")
    assert ran.code == 0
    assert "strategy traffic (flag --traffic)" in ran.out
    assert "buckets: 12 prompt, 12 decode" in ran.out
    assert "chosen for 1,500 recorded requests, cost in tokens" in ran.out
    assert "; the best choice there is" in ran.out
    assert llmc("plan", "show", "plan.json").out == ran.out


def test_evaluation_agrees_with_what_was_expected(llmc: Llmc) -> None:
    llmc("plan", *LENGTH, "--traffic", SAMPLE, "--max-graphs", 12, "-o", "plan.json")
    found = llmc("plan", "evaluate", "plan.json", "--traffic", SAMPLE, "--json").json
    facts = Plan.load("plan.json").provenance.facts
    assert found["prompt"]["padding"] == pytest.approx(facts["prompt_padding"], abs=1e-6)
    assert found["decode"]["padding"] == pytest.approx(facts["decode_padding"], abs=1e-6)
    assert found["prompt"]["requests"] == 1500
    assert found["prompt"]["uncovered"] == found["decode"]["uncovered"] == 0
    assert len(found["prompt"]["buckets"]) == 12
    assert found["traffic"]["admitted"] == 1500
    text = llmc("plan", "evaluate", "plan.json", "--traffic", SAMPLE).out
    assert f"padding {facts['prompt_padding']:.1%}" in text


def test_several_plans_are_compared_in_one_table(llmc: Llmc) -> None:
    llmc("plan", *LENGTH, "--strategy", "exponential", "-o", "exp.json")
    llmc("plan", *LENGTH, "--traffic", SAMPLE, "--max-graphs", 12, "-o", "ours.json")
    table = llmc("plan", "evaluate", "exp.json", "ours.json", "--traffic", SAMPLE).out
    assert [line.split()[0] for line in table.splitlines()[1:5]] == ["exp.json", "exp.json", "ours.json", "ours.json"]
    both = llmc("plan", "evaluate", "exp.json", "ours.json", "--traffic", SAMPLE, "--json").json["plans"]
    assert [one["plan"] for one in both] == ["exp.json", "ours.json"]
    assert both[1]["prompt"]["padding"] < 0.6 * both[0]["prompt"]["padding"]


def test_lengths_known_by_interval_give_a_padding_and_its_range(llmc: Llmc) -> None:
    Path("m.prom").write_text(scrape([40, 20, 5], [30, 30, 5]))
    llmc("plan", "--max-model-len", 1024, "--traffic", "m.prom", "--max-graphs", 6, "-o", "plan.json")
    found = llmc("plan", "evaluate", "plan.json", "--traffic", "m.prom", "--json").json
    low, high = found["padding_range"]["prompt"]
    assert low <= found["prompt"]["padding"] <= high and low < high
    text = llmc("plan", "evaluate", "plan.json", "--traffic", "m.prom").out
    assert f"prompt padding {found['prompt']['padding']:.1%} ({low:.1%} to {high:.1%})" in text
    both = llmc("plan", "evaluate", "plan.json", "plan.json", "--traffic", "m.prom").out
    assert both.count("plan.json: decode padding") == 2


def test_a_log_is_planned_from_as_it_is(llmc: Llmc) -> None:
    line = '{{"ts": {}, "usage": {{"prompt_tokens": {}, "completion_tokens": 5}}, "tok": {{"in": 7, "out": "3"}}}}\n'
    Path("access.log").write_text("".join(line.format(second, 3 + second % 9) for second in range(50)))
    plan = llmc("plan", *LENGTH, "--traffic", "access.log", "--max-graphs", 4)
    assert plan.code == 0 and "50 recorded requests" in plan.out
    fields = llmc("plan", *LENGTH, "--traffic", "access.log", "--fields", "prompt=tok.in,output=tok.out", "--json").json
    assert fields["provenance"]["facts"]["mean_prompt_tokens"] == 7
    assert "no column for the prompt" in llmc(
        "plan", *LENGTH, "--traffic", "access.log", "--traffic-format", "jsonl"
    ).failed(2)
    url = llmc("plan", *LENGTH, "--traffic", "http://localhost:8000/metrics").failed(2)
    assert "sample it with llmc traffic show http://localhost:8000/metrics --for 10m -o sampled.prom" in url


def test_arrivals_decide_how_full_batches_get(llmc: Llmc) -> None:
    llmc("plan", "--max-model-len", 8192, "--max-num-seqs", 8, "-o", "plan.json")

    def steps(rate: str) -> int:
        ran = llmc("plan", "evaluate", "plan.json", "--traffic", SAMPLE, "--arrival-rate", rate, "--json")
        return int(ran.json["decode"]["steps"])

    assert steps("inf") < steps("0.5") < steps("0.05")


def test_the_frontier_is_a_table_and_json(llmc: Llmc) -> None:
    table = llmc("plan", *LENGTH, "--traffic", SAMPLE, "--frontier").out
    assert "graphs  prompt padding  prompt gap  decode padding  decode gap" in table
    ran = llmc("plan", *LENGTH, "--traffic", SAMPLE, "--frontier", "--json")
    all_padding = [point["prompt"]["padding"] for point in ran.json["frontier"]]
    assert all_padding == sorted(all_padding, reverse=True)
    assert Plan.from_json(json.dumps(ran.json["plan"])).provenance.strategy == "traffic"


def test_contexts_may_be_counted_in_blocks(llmc: Llmc) -> None:
    ran = llmc(
        "plan",
        "--max-model-len",
        512,
        "--block-size",
        16,
        "--decode-seq",
        "4,8,32",
        "--context-unit",
        "blocks",
        "--json",
    )
    assert {context for _, _, context in ran.json["decode"]} == {64, 128, 256, 384, 512}


def test_buckets_from_a_file(llmc: Llmc, here: Path) -> None:
    (here / "buckets.txt").write_text("(1, [128, 511], 0)\n([1, 8], 1, 512)\n")
    built = llmc("plan", "--max-model-len", 512, "--from-file", "buckets.txt", "--json").json
    assert built["prompt"] == [[1, 128, 0], [1, 511, 0]]
    assert built["decode"] == [[1, 1, 512], [8, 1, 512]]
    assert built["provenance"]["strategy"] == "file"


def test_a_vendors_bucket_file_is_not_taken_for_tokens(llmc: Llmc, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same file says the same by the flag and by its variable, or the command asks."""
    (here / "buckets.txt").write_text("(1, [256, 512], [0, 4, 8])\n(32, 1, [512, 2048])\n(1, 1, 64)\n")
    limits = ("plan", "--max-model-len", 8192, "--max-num-seqs", 32)
    requested = llmc(*limits, "--from-file", "buckets.txt").failed(2)
    assert "(32, 1, 2048) is 2048 or 8192 tokens a sequence" in requested and "--context-unit blocks" in requested
    flag = llmc(*limits, "--from-file", "buckets.txt", "--context-unit", "blocks", "--json").json
    monkeypatch.setenv("VLLM_BUCKETING_FROM_FILE", "buckets.txt")
    variable = llmc(*limits, "--json").json
    assert flag["decode"] == variable["decode"] == [[1, 1, 8192], [32, 1, 2048], [32, 1, 8192]]
    assert flag["prompt"] == variable["prompt"]


def test_the_environments_file_counts_blocks(llmc: Llmc, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "buckets.txt").write_text("(1, 511, 0)\n(8, 1, 32)\n")
    monkeypatch.setenv("VLLM_BUCKETING_FROM_FILE", "buckets.txt")
    built = llmc("plan", "--max-model-len", 512, "--json").json
    assert built["decode"] == [[8, 1, 512]]
    assert built["provenance"]["origins"]["strategy"] == "environment VLLM_BUCKETING_FROM_FILE"


def test_rules_take_their_own_numbers(llmc: Llmc) -> None:
    ran = llmc("plan", "--max-model-len", 2048, "--strategy", "exponential", "--prompt-seq", "128,128,2048,4", "--json")
    assert sorted({query for _, query, _ in ran.json["prompt"]}) == [128, 384, 896, 2048]
    ran = llmc(
        "plan", "--max-model-len", 128, "--strategy", "padding-aware", "--prompt-seq", "16,16,128,32,25", "--json"
    )
    assert sorted({query for _, query, _ in ran.json["prompt"]}) == [16, 32, 48, 64, 80, 96, 128]


def test_compile_plans_from_traffic_too(llmc: Llmc, toy: Path, here: Path) -> None:
    (here / "t.csv").write_text(
        "time,prompt_tokens,output_tokens\n" + "".join(f"{i},{3 + i % 9},5\n" for i in range(50))
    )
    ran = llmc(
        "compile", toy, "--device", "fake", "--max-model-len", 32, "--max-num-seqs", 2, "--traffic", "t.csv",
        "--max-graphs", 3, "-o", "bundle", "--json",
    )  # fmt: skip
    assert ran.json["built"] <= 6
    assert "3-11" not in ran.out


def test_a_bundle_is_measured_and_planned_by(llmc: Llmc, bundle: Path, toy: Path, here: Path) -> None:
    ran = llmc("bench", bundle, "--seconds", 0, "-o", "bench.json", "--json")
    assert ran.json["device"] == "fake"
    (here / "t.csv").write_text(
        "time,prompt_tokens,output_tokens\n" + "".join(f"{i},{3 + i % 9},5\n" for i in range(50))
    )
    built = llmc(
        "plan", toy, "--max-model-len", 32, "--max-num-seqs", 4, "--traffic", "t.csv", "--bench", "bench.json",
        "--max-graphs", 4, "-o", "plan.json",
    )  # fmt: skip
    assert "cost in seconds" in built.out
    found = llmc("plan", "evaluate", "plan.json", "--traffic", "t.csv", "--bench", "bench.json", "--json").json
    assert found["prompt"]["seconds"] > 0
    table = llmc("bench", bundle, "--seconds", 0)
    assert table.code == 0
    assert table.out.splitlines()[0].split() == ["phase", "batch", "query", "context", "ms", "samples"]


def test_estimates_follow_the_device(llmc: Llmc, toy: Path, here: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 100, "max_position_embeddings": 256, **sizes}
    (here / "config.json").write_text(json.dumps(config))
    on_hpu = llmc("plan", "--config", "config.json", "--device", "hpu").out
    assert "estimated for device hpu:" in on_hpu
    assert "fixed on this device: batch, query, context" in on_hpu
    assert "none, one executable runs every shape" in llmc("plan", "--config", "config.json").out
    dry = llmc("compile", toy, "--device", "fake", "--max-model-len", 32, "--dry-run", "--json").json
    assert [one["name"] for one in dry["estimates"]] == ["executables", "compile time"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "evaluate", "--traffic", "t"], "llmc plan evaluate needs PLAN files"),
        (
            ["plan", "evaluate", "p", "--max-num-seqs", "2"],
            "replays traffic on finished plans; leave out",
        ),
        (["plan", "evaluate", "plan.json"], "name the recorded requests with --traffic FILE"),
        (["plan", *LENGTH, "--traffic", "absent.csv"], "absent.csv"),
        (["plan", *LENGTH, "--traffic", SAMPLE, "--max-graphs", 0], "--max-graphs 0 covers nothing"),
        (["plan", *LENGTH, "--traffic", SAMPLE, "--max-padding", "1%", "--max-graphs", 4], "the least is"),
        (["plan", *LENGTH, "--traffic", SAMPLE, "--max-compile-time", "1h"], "needs a model"),
        (["plan", *LENGTH, "--strategy", "traffic"], "name them with --traffic FILE"),
        (
            ["plan", *LENGTH, "--arrival-rate", "5"],
            "needs recorded requests: add --traffic FILE",
        ),
        (["plan", *LENGTH, "--device", "hpu"], "give MODEL or --config FILE"),
        (["plan", *LENGTH, "--context-unit", "pages"], "unknown context unit 'pages'; known: blocks, tokens"),
        (["plan", *LENGTH, "--from-file", "f", "--prompt-batch", "1,1,1"], "leave out --prompt-batch"),
        (["plan", *LENGTH, "--from-file", "f", "--strategy", "linear"], "were both given"),
    ],
)
def test_what_cannot_be_used_is_one_clear_line(llmc: Llmc, here: Path, arguments: list[object], message: str) -> None:
    llmc("plan", "--max-model-len", 64, "-o", "plan.json")
    assert message in llmc(*arguments).failed(2)


def test_a_plan_of_another_schema_is_refused(llmc: Llmc, here: Path) -> None:
    llmc("plan", "--max-model-len", 64, "-o", "plan.json")
    text = (here / "plan.json").read_text().replace('"schema": 1', '"schema": 7')
    (here / "plan.json").write_text(text)
    assert "field 'schema' is 7, this version of llmc reads 1; plan anew" in llmc(
        "plan", "evaluate", "plan.json", "--traffic", SAMPLE
    ).failed(2)


@full
def test_plans_are_drawn(llmc: Llmc, here: Path) -> None:
    ran = llmc(
        "plan", *LENGTH, "--traffic", SAMPLE, "--max-graphs", 8, "--frontier", "--plot", "plan.html", "-o", "a.json"
    )
    assert ran.code == 0
    assert "wrote plan.html" in ran.err
    assert "1,500" in (here / "plan.html").read_text()
    assert llmc("plan", "evaluate", "a.json", "--traffic", SAMPLE, "--plot", "plan.png").code == 0
    assert (here / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert llmc("plan", "show", "a.json", "--plot", "shown.png").code == 0
    assert "plan.gif" in llmc("plan", "show", "a.json", "--plot", "plan.gif").failed(2)
