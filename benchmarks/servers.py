"""Padding of the lists that llmc proposes to servers, against each server's own, by that server's rules.

    python benchmarks/servers.py FOLDER [--server NAME…] [-o servers.json]

FOLDER holds AzureLLMInferenceTrace_conv.csv and AzureLLMInferenceTrace_code.csv (Azure Public Dataset, CC BY 4.0).
Lists are proposed for the first half of a trace and judged on the second. "ratio" is the padded work (padded minus
real) of a list with as many graphs as the server's own, over that of its own; "half" is that with half of the graphs;
"as few" the least share of the graphs with which a list pads no more than the server's own. Seconds are of one proposal
for a half, from its requests to the lists.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path

from llmc.buckets.servers import create
from llmc.buckets.servers.base import Lists, Server, Setup
from llmc.buckets.servers.demand import Demands, collect
from llmc.buckets.servers.settings import Value, complete
from llmc.buckets.traffic.admission import Admission
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.reader import Trace
from llmc.buckets.traffic.step_time import AssumedStepTime
from llmc.errors import InputError

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
)
"""Server, its limits, and settings of its own."""


def halves(trace: Path, setup: Setup) -> tuple[list[TrafficRequest], list[TrafficRequest]]:
    """The first and the second half of the requests that the limits admit, each from time 0."""
    requests = list(Admission(setup.limits)(Trace(trace)))
    first, second = requests[: len(requests) // 2], requests[len(requests) // 2 :]
    return first, [request._replace(time=request.time - second[0].time) for request in second]


def padding(server: Server, setup: Setup, lists: Lists, demands: Demands) -> dict[str, tuple[int, int, int]]:
    """(padded minus real work, real work, steps that miss) of each family."""
    found = {}
    for family, shapes in lists.items():
        finder = server.finder(setup, family, shapes)
        padded = real = missed = 0
        for shape, demand in demands.get(family, {}).items():
            taken = finder.find(shape)
            runs = tuple(map(max, taken.shape, shape))
            padded += server.work(setup, family, runs) * demand.steps
            real += demand.real
            missed += demand.steps if taken.miss else 0
        found[family] = padded - real, real, missed
    return found


def proposed(server: Server, setup: Setup, demands: Demands, most: Mapping[str, int]) -> Lists:
    """What the server makes of the lists that are proposed to it."""
    return server.accept(setup, server.propose(setup, demands, most)).lists


def fewest(server: Server, setup: Setup, family: str, own: Lists, plan: Demands, judge: Demands, bound: int) -> int:
    """The fewest graphs of `family` with which a proposed list pads at most `bound`; as many as its own where none."""
    counts = {name: len(shapes) for name, shapes in own.items()}
    low, high = 0, counts[family]
    while low + 1 < high:
        middle = (low + high) // 2
        try:
            lists = proposed(server, setup, plan, {**counts, family: middle})
            enough = padding(server, setup, lists, judge)[family][0] <= bound
        except InputError:
            enough = False
        low, high = (low, middle) if enough else (middle, high)
    return high


def compare(trace: Path, name: str, limits: Mapping[str, int], given: Mapping[str, Value]) -> list[dict[str, object]]:
    """A row for each family of the server."""
    server = create(name)
    setup = Setup(server.limits(limits), complete(server.settings, given))
    first, second = halves(trace, setup)
    own = server.default(setup)
    counts = {family: len(shapes) for family, shapes in own.items()}
    began = time.perf_counter()
    plan = collect(server.demands(setup, first, AssumedStepTime()))
    equal = proposed(server, setup, plan, counts)
    seconds = time.perf_counter() - began
    few = proposed(server, setup, plan, {family: max(1, count // 2) for family, count in counts.items()})
    judge = collect(server.demands(setup, second, AssumedStepTime()))
    by_own, by_equal, by_few = (padding(server, setup, lists, judge) for lists in (own, equal, few))
    rows = []
    for family in server.families:
        if not by_own[family.name][1]:
            continue
        pads, real, missed = by_own[family.name]
        least = fewest(server, setup, family.name, own, plan, judge, pads)
        rows.append(
            {
                "server": name, "trace": trace.stem.rpartition("_")[2], "max_num_seqs": setup.limits.max_num_seqs,
                "settings": dict(given), "family": family.name, "unit": family.unit, "graphs": counts[family.name],
                "own_waste": pads / real, "waste": by_equal[family.name][0] / real,
                "ratio": by_equal[family.name][0] / pads if pads else math.nan,
                "half": by_few[family.name][0] / pads if pads else math.nan, "as_few": least / counts[family.name],
                "own_missed": missed, "missed": by_equal[family.name][2], "seconds": seconds,
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--server", action="append", help="only these")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    print("| server | settings | trace | max_num_seqs | family | graphs | its own waste | proposed | ratio | half | "
          "as few | missed | s |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for name, limits, given in CASES:
        if arguments.server and name not in arguments.server:
            continue
        words = ", ".join(f"{key} {value}" for key, value in given.items())
        for trace in ("conv", "code"):
            for row in compare(arguments.traces / f"AzureLLMInferenceTrace_{trace}.csv", name, limits, given):
                rows.append(row)
                print(
                    f"| {name} | {words} | {trace} | {row['max_num_seqs']} | {row['family']} | {row['graphs']} "
                    f"| {row['own_waste']:.1%} | {row['waste']:.1%} | {row['ratio']:.2f} | {row['half']:.2f} "
                    f"| {row['as_few']:.2f} | {row['missed']} | {row['seconds']:.1f} |",
                    flush=True,
                )
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
