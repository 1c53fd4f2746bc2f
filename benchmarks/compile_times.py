"""Seconds of the compiles that a user waits for, each as a whole process, on one plan.

    python benchmarks/compile_times.py --work FOLDER [--plan PLAN] [-o result.json]

The plan is the Gaudi guide's example unless one is given. From an empty store: default, default again, specialised
(sharing what the default left), specialised again, and specialised with one decode bucket more.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import time
from pathlib import Path

from models import GUIDE, LLMC

from llmc.compiler.checkpoint import DEMO


def run(work: Path, plan: Path, out: str, *flags: str) -> dict:
    command = [
        LLMC, "compile", DEMO, "--plan", str(plan),
        "--cache-dir", str(work / "cache"), "-o", str(work / out), "--json", "-q", *flags,
    ]  # fmt: skip
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    found["process_seconds"] = round(time.perf_counter() - start, 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(args.work / "cache", ignore_errors=True)
    if args.plan is None:
        args.plan = args.work / "plan.json"
        subprocess.run([LLMC, "plan", DEMO, *GUIDE, "-o", str(args.plan)], stdout=subprocess.DEVNULL, check=True)
    plan = json.loads(args.plan.read_text())
    plan["decode"].append([3, 1, 2048])
    plan["decode"].sort()
    grown = args.work / "plan-grown.json"
    grown.write_text(json.dumps(plan))
    results = {
        "default, empty store": run(args.work, args.plan, "bundle"),
        "default again": run(args.work, args.plan, "bundle"),
        "specialised, same store": run(args.work, args.plan, "specialised", "--specialise"),
        "specialised again": run(args.work, args.plan, "specialised", "--specialise"),
        "specialised, one bucket more": run(args.work, grown, "grown", "--specialise"),
    }
    shutil.rmtree(args.work / "cache")
    results["specialised, empty store"] = run(args.work, args.plan, "specialised", "--specialise")
    for name, r in results.items():
        print(
            f"{name:30s} {r['process_seconds']:7.2f} s  built {r['built']:2d}  reused {r['reused']:2d}  "
            f"{r['bytes'] / 1e6:.1f} MB (weights {r['weights_bytes'] / 1e6:.1f})  stages {r['stages']}"
        )
    if args.output:
        args.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
