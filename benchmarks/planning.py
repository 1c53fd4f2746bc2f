"""Padding of plans on the Azure traces, and how long planning takes.

    python benchmarks/planning.py FOLDER [-o planning.json]

FOLDER holds AzureLLMInferenceTrace_conv.csv and AzureLLMInferenceTrace_code.csv (Azure Public Dataset, CC BY 4.0).
Plans are made from the first half of a trace and judged on the second, each strategy against a plan from traffic with
the same number of graphs.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from pathlib import Path
from statistics import median

from llmc.buckets.coverage import prove
from llmc.buckets.evaluation.replay import replay
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan
from llmc.buckets.planner.budget import Budget
from llmc.buckets.planner.planner import make_plan
from llmc.buckets.strategies.base import Range
from llmc.buckets.traffic.source import Traffic

RULES = ("exponential", "powers-of-two", "padding-aware", "linear")
MAX_MODEL_LEN = 8192


def halves(trace: Path, folder: Path) -> tuple[Path, Path]:
    """The first and the second half of a trace's requests, as files."""
    header, *rows = trace.read_text().splitlines()
    middle = len(rows) // 2
    files = folder / f"{trace.stem}-1.csv", folder / f"{trace.stem}-2.csv"
    for file, part in zip(files, (rows[:middle], rows[middle:]), strict=True):
        file.write_text("\n".join([header, *part]) + "\n")
    return files


def compare(name: str, first: Path, second: Path, seqs: int, rate: float | None) -> list[dict]:
    """A row for each rule and phase: its graphs and padding, and the padding of a traffic plan of as many graphs."""
    limits = Limits(MAX_MODEL_LEN, seqs)
    rows = []
    for rule in RULES:
        by_rule = make_plan(limits, rule)
        judged = replay(by_rule, Traffic(second, rate))
        for phase in ("prompt", "decode"):
            graphs = len(getattr(by_rule, phase))
            began = time.perf_counter()
            ours = make_plan(limits, traffic=Traffic(first, rate), budget=Budget(max_graphs=graphs))
            seconds = time.perf_counter() - began
            padding = getattr(judged, phase).padding
            found = getattr(replay(ours, Traffic(second, rate)), phase).padding
            rows.append(
                {
                    "trace": name, "seqs": seqs, "rate": rate, "phase": phase, "rule": rule, "graphs": graphs,
                    "rule_padding": padding, "traffic_padding": found,
                    "ratio": found / padding if padding else math.nan,
                    "gap": ours.provenance.facts[f"{phase}_gap"], "seconds": seconds,
                }
            )  # fmt: skip
            print(
                f"| {name} | {seqs} | {phase} | {rule} | {graphs} | {padding:.1%} | {found:.1%} "
                f"| {rows[-1]['ratio']:.2f} | {rows[-1]['gap']:.1%} | {seconds:.1f} |",
                flush=True,
            )
    return rows


def planning_seconds(trace: Path, seqs: int, rounds: int = 3) -> list[float]:
    """Seconds to plan a whole trace into 64 graphs of each phase, from opening the file to the plan."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        make_plan(Limits(MAX_MODEL_LEN, seqs), traffic=Traffic(trace), budget=Budget(max_graphs=64))
        times.append(time.perf_counter() - began)
    return times


def large_plan() -> tuple[Plan, float]:
    """A linear plan of 14,368 + 4,042 buckets, and the seconds to generate and prove it."""
    began = time.perf_counter()
    plan = make_plan(
        Limits(7520, 43, block_size=16, max_prompt_len=7184),
        prompt_batch=Range(1, 1, 32),
        prompt_query=Range(16, 16, 7184),
        decode_batch=Range(1, 1, 43),
        decode_context=Range(80, 80, 7520),
    )
    missing = prove(plan.limits, plan.buckets)
    seconds = time.perf_counter() - began
    assert not missing
    return plan, seconds


def lookup_microseconds(plan: Plan, count: int = 200_000) -> float:
    rng = random.Random(0)
    limits = plan.limits
    requests = [
        ("decode", rng.randint(1, limits.max_num_seqs), 1, rng.randint(0, limits.longest_past)) for _ in range(count)
    ]
    plan.lookup("decode", 1, 1, 1)
    lookup = plan.lookup
    began = time.perf_counter()
    for request in requests:
        lookup(*request)
    return (time.perf_counter() - began) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    found: dict[str, object] = {}
    rows: list[dict] = []
    print("| trace | max_num_seqs | phase | rule | graphs | its padding | by traffic | ratio | gap | planned in s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("conv", "code"):
            trace = arguments.traces / f"AzureLLMInferenceTrace_{name}.csv"
            first, second = halves(trace, Path(folder))
            for seqs in (1, 8, 32):
                rows += compare(name, first, second, seqs, None)
    found["padding"] = rows
    for seqs in (8, 64):
        times = planning_seconds(arguments.traces / "AzureLLMInferenceTrace_conv.csv", seqs)
        found[f"planning_seconds_{seqs}"] = times
        print(f"planning the conv trace into 64 graphs a phase, max_num_seqs {seqs}: {median(times):.2f} s")
    plan, seconds = large_plan()
    times = [large_plan()[1] for _ in range(5)]
    print(f"linear plan of {len(plan.prompt)} + {len(plan.decode)} buckets generated and proven: {median(times):.3f} s")
    microseconds = median(lookup_microseconds(plan) for _ in range(5))
    print(f"lookup in {len(plan.buckets)} buckets: {microseconds:.2f} µs")
    found |= {"large_plan_seconds": times, "lookup_microseconds": microseconds, "first_large_plan_seconds": seconds}
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
