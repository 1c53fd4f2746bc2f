"""Compiles over a local Ray cluster against local jobs, at equal workers; and what more workers would gain.

    python benchmarks/ray_compile.py --work FOLDER [--workers 1,2,4] [--rounds 1] [--model MODEL] [-o result.json]

The plan is the Gaudi guide's (72 buckets) for xla, unless --max-model-len gives a smaller one. The model is a random
Llama of two layers, unless --model names another: what is measured is what the cluster adds, and with SmolLM2-135M one
compile of all buckets takes half an hour. Trace and weights are in the store before; each round compiles all
executables anew, local and Ray one after the other. Seconds are of the executables alone, from the end of lowering to
the last report.

Beyond this host's workers the model is: n tasks with the measured times t, taken in order by the first free of w
workers (list scheduling), each `overhead` longer: the difference of Ray and local in worker seconds a task, measured at
the largest number of workers. Fetching is not in it: nodes are assumed to have the lowered program.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from models import GUIDE, LLMC
from random_llama import write
from ray.cluster_utils import Cluster

from llmc.artifacts.store.store import Store
from llmc.buckets.plan import Plan
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import Event, ExecutableReport, compile_bundle
from llmc.compiler.stages import StageReport
from llmc.settings import Settings

SIMULATED = (8, 16, 32, 64)
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def makespan(seconds: Sequence[float], workers: int) -> float:
    """When the last task ends, each taken by the first worker that is free."""
    free = [0.0] * workers
    for one in seconds:
        heapq.heapreplace(free, free[0] + one)
    return max(free)


def executables(model: str, store: Store, work: Path, plan: Plan, **options: object) -> dict:
    """Seconds that all executables took together, and each by its worker; they are removed from the store before."""
    for entry in store.entries("executable"):
        store.layout.entry(entry.key.kind, entry.key.hex).unlink()
    lowered, last, each = 0.0, 0.0, list[float]()

    def report(event: Event) -> None:
        nonlocal lowered, last
        if isinstance(event, ExecutableReport):
            last = time.perf_counter()
            each.append(event.seconds)
        elif isinstance(event, StageReport) and not each and event.seconds is not None:
            lowered = time.perf_counter()

    requested = CompileOptions.of("xla", verify="none", **options)
    compile_bundle(model, work / "bundle", plan, requested, store, report, Settings.from_environment({}))
    return {"seconds": last - lowered, "each": each}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--model")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("-o", "--output", type=Path)
    requested = parser.parse_args()
    flags = (
        ["--max-model-len", str(requested.max_model_len), "--max-num-seqs", "2"] if requested.max_model_len else GUIDE
    )
    file = requested.work / "plan.json"
    requested.work.mkdir(parents=True, exist_ok=True)
    model = requested.model or str(requested.work / "tiny")
    if requested.model is None:
        write(Path(model), 0, TINY)
    subprocess.run([LLMC, "plan", model, "--device", "xla", *flags, "-o", str(file), "-q"], check=True)
    plan = Plan.load(file)
    store, found = Store(requested.work / "store"), []
    for workers in map(int, requested.workers.split(",")):
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": workers, "include_dashboard": False})
        try:
            ray = {"executor": "ray", "address": cluster.address}
            runs: dict[str, list[dict]] = {"local": [], "ray": []}
            for _ in range(requested.rounds):
                runs["local"].append(executables(model, store, requested.work, plan, jobs=workers))
                runs["ray"].append(executables(model, store, requested.work, plan, **ray))
        finally:
            cluster.shutdown()
        local, far = (statistics.median(run["seconds"] for run in runs[name]) for name in ("local", "ray"))
        found.append({"workers": workers, "local_s": local, "ray_s": far, "overhead": far / local - 1, "runs": runs})
        print(f"{workers} workers: local {local:.1f} s, Ray {far:.1f} s ({far / local - 1:+.1%})", flush=True)
    top = found[-1]
    each = top["runs"]["local"][-1]["each"]
    extra = max(0.0, (top["ray_s"] - top["local_s"]) * top["workers"] / len(each))
    one = sum(each)
    simulated = {w: one / makespan([s + extra for s in each], w) for w in SIMULATED}
    print("simulated: " + ", ".join(f"{w} workers {gain:.1f} ×" for w, gain in simulated.items()))
    if requested.output:
        requested.output.write_text(json.dumps({"measured": found, "simulated": simulated, "extra_s": extra}, indent=1))


if __name__ == "__main__":
    main()
