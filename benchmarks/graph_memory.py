"""Memory of a bundle's executables beside weights and KV cache: what `llmc plan` says, and what a process took.

    python benchmarks/graph_memory.py MODEL BUNDLE [BUNDLE …] [-o OUT.json]

A process of its own opens the bundle and runs every executable three times, in the order of a warm-up; where any shape
runs, prompts of up to the largest chunk. Real are anonymous bytes, what the executor says of its cache not counted:
those kept after all, and the most that a run took beside them. `own` is each executable's increment. `next` is what
the predictor of graph capture (buckets/capture/predict.py) said of each before it was opened, from those before.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from llmc.buckets.bucket import Bucket
from llmc.buckets.capture.order import warm_up_order
from llmc.buckets.capture.predict import Predictor
from llmc.compiler.estimates.footprint import Footprint
from llmc.compiler.options import CompileOptions
from llmc.compiler.targets import open_target
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import executor_class, open_executor
from llmc.runtime.executors.base import Executor
from llmc.runtime.heap import trim
from llmc.runtime.step import Step, exact, pad, ragged
from llmc.settings import Settings

RUNS = 3


def status() -> dict[str, int]:
    """Bytes by /proc's names."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0][:-1]: int(words[1]) << 10 for words in lines if words[-1] == "kB"}


def kept() -> int:
    """Anonymous bytes that are not free."""
    gc.collect()
    trim()
    return status()["RssAnon"]


def peak(executor: Executor, step: Step) -> int:
    """Anonymous bytes at the height of a run; pages of files only grow, and are counted as they are after it."""
    trim()
    Path("/proc/self/clear_refs").write_text("5")
    executor.run(step)
    after = status()
    return after["VmHWM"] - after["RssFile"]


def steps_of(executor: Executor, bundle: Bundle) -> list[tuple[Bucket, Step]]:
    """A step for each executable; where any shape runs, a short prompt and the longest."""
    if not executor.capabilities.exact:
        order = warm_up_order(bundle.plan.buckets)
        return [(b, pad(b, [0], [[0] * b.query], [0])) for b in order]
    make = ragged if executor.capabilities.ragged else exact
    most = min(executor.capabilities.prompt_chunk or 512, bundle.plan.limits.longest_prompt)
    return [(Bucket("prompt", 1, n, 0), make("prompt", [0], [[0] * n], [0])) for n in (1, most)]


def measure(path: str, sent: Connection) -> None:
    """All of one bundle: {"own": [[phase, batch, query, context, bytes] …], "kept", "most"}."""
    bundle = Bundle.open(path)
    executor_class(bundle.manifest.executor)
    empty = kept()
    executor = open_executor(bundle, threads=2)
    if executor.capabilities.exact:
        executor.open_all()
    held = executor.memory().get("cache", 0) if executor.memory().get("cache_pool") is None else 0
    before = empty if executor.capabilities.exact else kept() - held
    own, most = [], 0
    for bucket, step in steps_of(executor, bundle):
        for _ in range(RUNS - 1):
            executor.run(step)
        high = peak(executor, step)
        now, cache = kept(), executor.memory()["cache"]
        own.append([bucket.phase, bucket.batch, bucket.query, bucket.context, now - cache - before])
        before = now - cache
        most = max(most, high - now)
    sent.send({"own": own, "kept": sum(one[-1] for one in own), "most": most})
    executor.close()


def next_ratios(own: list[list[Any]], predicted: Any) -> list[float]:
    """Predicted over real of each graph but the first of its phase, which brings what all share."""
    predictors = {phase: Predictor(predicted) for phase in ("prompt", "decode")}
    seen: set[str] = set()
    ratios = []
    for phase, batch, query, context, size in own:
        bucket = Bucket(phase, batch, query, context)
        if phase in seen:
            ratios.append(predictors[phase](bucket) / max(1, size))
        if phase in seen:
            predictors[phase].add(bucket, max(0, size))
        seen.add(phase)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("bundles", nargs="+")
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args()
    found = {}
    for path in args.bundles:
        take, give = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=measure, args=(path, give))
        process.start()
        give.close()
        real = take.recv()
        process.join()
        bundle = Bundle.open(path)
        manifest, options = bundle.manifest, bundle.manifest.options
        own = {option.name: options.get(option.name) for option in open_target(manifest.device).description.options}
        requested = CompileOptions.of(
            manifest.device, quantize=str(options["quantize"]), dtype=str(options["dtype"]),
            specialise=bool(options.get("specialise")), **own,
        )  # fmt: skip
        footprint = Footprint.open(
            args.model, bundle.plan.limits, manifest.device, Settings.from_environment(), options=requested
        )
        predicted, total = footprint.graph_bytes(bundle.plan.buckets), real["kept"] + real["most"]
        ratios = next_ratios(real["own"], footprint.executable_bytes) if len(real["own"]) > 2 else []
        found[path] = {
            "device": manifest.device, "executables": len(manifest.executables), "predicted": predicted, "real": total,
            "ratio": predicted / total, **real, "next_median": median(ratios) if ratios else None,
            "next_within_15%": sum(0.85 <= r <= 1.15 for r in ratios) / len(ratios) if ratios else None,
        }  # fmt: skip
        line = f"{path}: {len(manifest.executables)} executables, predicted {predicted / 1e6:.1f} MB, "
        line += f"real {total / 1e6:.1f} MB (kept {real['kept'] / 1e6:.1f}), ratio {predicted / total:.2f}"
        if ratios:
            line += f"; next graph: median ratio {median(ratios):.2f}, {found[path]['next_within_15%']:.0%} within 15%"
        print(line, flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
