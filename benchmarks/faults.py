"""Faults injected into the store, and the same into the caches of baselines.

    python benchmarks/faults.py [--kills 2000] [--flips all|N] [--baseline-python PYTHON] [-o faults.json]

Prints a table in Markdown. Rows and words are explained in `Row` of faults_rows.py. Without --baseline-python only llmc
is measured. Faults by system call need strace, and are left out without it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from faults_caches import load
from faults_inject import SAMPLES, Bench, all_rows

COLUMNS = ("injected", "wrong", "lost", "wedged", "raised", "left")
BASELINES = ("jax", "diskcache")


def measure(cache: str, kills: int, samples: int, rounds: int, processes: int, seed: int, folder: str | None) -> dict:
    """All rows of one cache, in this process."""
    version = load(cache)
    rows = []
    with tempfile.TemporaryDirectory(dir=folder) as name:
        bench = Bench(cache, Path(name), seed)
        began = time.perf_counter()
        for row in all_rows(bench, kills, samples, rounds, processes):
            rows.append({**row.to_dict(), "seconds": round(time.perf_counter() - began, 1)})
            print(f"{cache}: {rows[-1]}", file=sys.stderr, flush=True)
            began = time.perf_counter()
    return {"cache": cache, "version": version, "rows": rows}


def table(results: list[dict]) -> str:
    """The rows as Markdown."""
    lines = [f"| fault | cache | {' | '.join(COLUMNS)} |", "|---|---|" + "---:|" * len(COLUMNS)]
    for rows in zip(*(result["rows"] for result in results), strict=True):
        for result, row in zip(results, rows, strict=True):
            numbers = " | ".join(str(row[name]) for name in COLUMNS)
            lines.append(f"| {row['fault']} | {result['cache']} {result['version']} | {numbers} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=2000, help="victims killed after a random time")
    parser.add_argument("--flips", default=str(SAMPLES), help="places damaged in a large file; all: 4096 of them")
    parser.add_argument("--rounds", type=int, default=10, help="crowds")
    parser.add_argument("--processes", type=int, default=64, help="in a crowd")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", help="where the caches are made (default: the system's folder for temporaries)")
    parser.add_argument("--baseline-python", help="a Python that has jax and diskcache")
    parser.add_argument("--cache", choices=["llmc", *BASELINES], help="measure this one only, and print JSON")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    samples = 4096 if given.flips == "all" else int(given.flips)
    if given.cache:
        found = measure(given.cache, given.kills, samples, given.rounds, given.processes, given.seed, given.folder)
        print(json.dumps(found))
        return
    results = []
    for cache in ("llmc", *(BASELINES if given.baseline_python else ())):
        python = sys.executable if cache == "llmc" else given.baseline_python
        command = [python, __file__, "--cache", cache, "--kills", str(given.kills), "--flips", given.flips]
        command += ["--rounds", str(given.rounds), "--processes", str(given.processes), "--seed", str(given.seed)]
        command += ["--folder", given.folder] if given.folder else []
        results.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
    if given.output:
        given.output.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
