"""Padding of the lists that llmc proposes to servers, against each server's own, by that server's rules.

    python benchmarks/servers.py FOLDER [--server NAME…] [--at-once] [-o servers.json]

FOLDER holds AzureLLMInferenceTrace_conv.csv and AzureLLMInferenceTrace_code.csv (Azure Public Dataset, CC BY 4.0).
Lists are made from the first half of a trace and judged on the second. Paddings are of the server's own lists; of
`llmc plan tune`'s with as many graphs; of those for the traffic alone (--hedge 0); and of those with half of the
graphs. "Worst shift" is the most points by which tuned lists pad a shift of the first half more than the server's own
lists do, negative where they pad each less. "As few" is the least share of the graphs with which a list for the
traffic alone pads no more than the server's own; of a server with one family, which may have several graphs for a
shape, the share of those graphs. Seconds are of tuning, from the requests of a half to the lists.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc.buckets.traffic.admission import Admission
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.reader import Trace
from llmc.buckets.traffic.step_time import AssumedStepTime
from llmc.errors import InputError
from llmc.integrations import bucket_rules
from llmc.integrations.base import BucketRules, Demands, Lists, Setup, collect
from llmc.integrations.evaluation import evaluate
from llmc.integrations.settings import Value, complete
from llmc.integrations.shifts import shifted
from llmc.integrations.tune import ServerBudget, tune

AT_8192 = {"max_model_len": 8192, "max_num_batched_tokens": 8192}
CASES: tuple[tuple[str, dict[str, int], dict[str, Value]], ...] = (
    ("vllm-gaudi", {"max_model_len": 8192, "max_num_seqs": 32, "block_size": 128}, {}),
    ("vllm-gaudi", {"max_model_len": 8192, "max_num_seqs": 128, "block_size": 128}, {}),
    ("vllm-gaudi", {"max_model_len": 8192, "max_num_seqs": 32, "block_size": 128}, {"prefix_caching": False}),
    ("vllm-gaudi", {"max_model_len": 8192, "max_num_seqs": 128, "block_size": 128}, {"prefix_caching": False}),
    ("tpu-inference", {"max_model_len": 8192, "max_num_seqs": 32, "max_num_batched_tokens": 8192}, {}),
    ("tpu-inference", {"max_model_len": 8192, "max_num_seqs": 128, "max_num_batched_tokens": 8192}, {}),
    ("tpu-inference", {"max_model_len": 8192, "max_num_seqs": 256, "max_num_batched_tokens": 8192}, {}),
    ("tpu-inference", {"max_model_len": 8192, "max_num_seqs": 128, "max_num_batched_tokens": 2048}, {}),
    ("vllm-neuron", {"max_model_len": 8192, "max_num_seqs": 32, "max_num_batched_tokens": 8192}, {}),
    ("vllm-neuron", {"max_model_len": 8192, "max_num_seqs": 128, "max_num_batched_tokens": 8192}, {}),
    ("nxd", {"max_model_len": 8192, "max_num_seqs": 16}, {}),
    ("vllm", {**AT_8192, "max_num_seqs": 256}, {}),
    ("vllm", {**AT_8192, "max_num_seqs": 256}, {"cudagraph_mode": "FULL_DECODE_ONLY"}),
    ("vllm", {**AT_8192, "max_num_seqs": 256}, {"num_speculative_tokens": 3}),
    ("sglang", {**AT_8192, "max_num_seqs": 256}, {}),
    ("tensorrt-llm", {**AT_8192, "max_num_seqs": 128}, {"enable_padding": True}),
    ("optimum-rbln", {"max_model_len": 8192, "max_num_seqs": 64}, {"decode_batch_bucket_limit": 7}),
)
"""Server, its limits, and settings of its own."""


def halves(trace: Path, setup: Setup, *, at_once: bool) -> tuple[list[TrafficRequest], list[TrafficRequest]]:
    """The first and the second half of the requests that the limits admit, each from time 0, or all at time 0."""
    requests = list(Admission(setup.limits)(Trace(trace)))
    if at_once:
        requests = [request._replace(time=0.0) for request in requests]
    first, second = requests[: len(requests) // 2], requests[len(requests) // 2 :]
    return first, [request._replace(time=request.time - second[0].time) for request in second]


def padding(server: BucketRules, setup: Setup, lists: Lists, demands: Demands) -> dict[str, tuple[int, int, int]]:
    """(padded minus real work, real work, steps that miss) of each family, as `llmc plan evaluate` counts them."""
    families = evaluate(server, setup, lists, demands).families
    return {found.family.name: (found.padded - found.real, found.real, found.missing) for found in families}


def proposed(server: BucketRules, setup: Setup, demands: Demands, most: Mapping[str, int]) -> Lists:
    """What the server makes of the lists that are proposed to it."""
    return server.accept(setup, server.propose(setup, demands, most)).lists


def fewest(
    server: BucketRules, setup: Setup, family: str, own: Lists, plan: Demands, judge: Demands, bound: int
) -> float:
    """The least share of the graphs of `family` with which a proposed list pads at most `bound`; 1 where none does."""
    counts = {name: len(shapes) for name, shapes in own.items()}
    low, high, share = 0, counts[family], 1.0
    while low + 1 < high:
        middle = (low + high) // 2
        try:
            lists = proposed(server, setup, plan, {**counts, family: middle})
            enough = padding(server, setup, lists, judge)[family][0] <= bound
        except InputError:
            enough = False
        if enough:
            alone = server.graphs(setup, lists) / server.graphs(setup, own)
            high, share = middle, alone if len(own) == 1 else len(lists[family]) / counts[family]
        else:
            low = middle
    return min(share, 1.0)


def compare(
    trace: Path, name: str, limits: Mapping[str, int], given: Mapping[str, Value], *, at_once: bool
) -> list[dict[str, Any]]:
    """A row for each family of the server."""
    server = bucket_rules(name)
    setup = Setup(server.limits(limits), complete(server.settings, given))
    first, second = halves(trace, setup, at_once=at_once)
    own = server.default(setup)
    counts = {family: len(shapes) for family, shapes in own.items()}
    began = time.perf_counter()
    plan = collect(server.demands(setup, first, AssumedStepTime()))
    shifts = shifted(server, setup, first, AssumedStepTime())
    tuned = tune(server, setup, plan, ServerBudget(), shifts=shifts)
    seconds = time.perf_counter() - began
    alone = tune(server, setup, plan, ServerBudget())
    few = tune(server, setup, plan, ServerBudget(graphs=max(1, tuned.default.graphs // 2)), shifts=shifts)
    judge = collect(server.demands(setup, second, AssumedStepTime()))
    by_own, by_tuned, by_alone, by_few = (
        padding(server, setup, lists, judge) for lists in (own, *(one.plan.lists for one in (tuned, alone, few)))
    )
    rows = []
    for family in server.families:
        if not by_own[family.name][1]:
            continue
        pads, real, missed = by_own[family.name]
        rows.append(
            {
                "server": name, "trace": trace.stem.rpartition("_")[2], "max_num_seqs": setup.limits.max_num_seqs,
                "settings": dict(given), "family": family.name, "unit": family.unit, "graphs": counts[family.name],
                "own_padding": pads / real,
                **{name: found[family.name][0] / real
                   for name, found in (("padding", by_tuned), ("alone", by_alone), ("half", by_few))},
                "worst_shift": 100 * max(
                    ((chosen.padding[family.name] or 0.0) - (before.padding[family.name] or 0.0)
                     for before, chosen in tuned.shifts.values())
                ),
                "as_few": fewest(server, setup, family.name, own, plan, judge, pads),
                "own_missed": missed, "missed": by_tuned[family.name][2], "seconds": seconds,
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--server", action="append", help="only these")
    parser.add_argument("--at-once", action="store_true", help="all requests at time 0, not at the trace's own times")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("| server | settings | trace | max_num_seqs | family | graphs | its own padding | tuned | for the traffic "
          "alone | half of the graphs | worst shift, points | as few | missed | s |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for name, limits, given in CASES:
        if arguments.server and name not in arguments.server:
            continue
        words = ", ".join(f"{key} {value}" for key, value in given.items())
        for trace in ("conv", "code"):
            file = arguments.traces / f"AzureLLMInferenceTrace_{trace}.csv"
            for row in compare(file, name, limits, given, at_once=arguments.at_once):
                rows.append(row)
                print(
                    f"| {name} | {words} | {trace} | {row['max_num_seqs']} | {row['family']} | {row['graphs']} "
                    f"| {row['own_padding']:.1%} | {row['padding']:.1%} | {row['alone']:.1%} | {row['half']:.1%} "
                    f"| {row['worst_shift']:.1f} | {row['as_few']:.2f} | {row['missed']} | {row['seconds']:.1f} |",
                    flush=True,
                )
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
