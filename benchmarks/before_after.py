"""This version of llmc against another one on the same checkpoint, in turn: what a change gained, and what it lost.

    python benchmarks/before_after.py --before OTHER/bin/python [--work .bench/before-after] [--rounds 6] [-o out.json]

OTHER is an environment with the other version of llmc. Each version compiles bundles of its own, with the same flags,
and answers in processes of its own; a ratio is this version's figure over the other's in the same round
(docs/performance.md). Rounds are even, since who is first in one is faster (145 and 175 ms, a prompt of 512 tokens).
Exit code 1 where a median ratio is worse than `--tolerance` allows, or there is none: the machine's noise decides
how small the tolerance can be.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from baselines import compare
from baselines.report_text import text
from baselines.results import Comparison
from baselines.scope import Scope
from baselines.worker import Contender
from models import PARTS

from llmc.runtime.bundle import Bundle

KINDS = ("decode", "prefill", "first-token", "memory", "streams")


def contenders(quantize: str, device: str, flags: tuple[str, ...], args: argparse.Namespace) -> list[Contender]:
    """A bundle of each version, compiled where it is not there yet."""
    found = []
    for name, python in (("after", sys.executable), ("before", args.before)):
        bundle = args.work / f"{name}-{device}-{quantize}-{flags[1]}-{flags[-1]}"
        command = [
            python, "-m", "llmc", "compile", args.model, "--device", device, "--quantize", quantize, *flags,
            "--cache-dir", str(args.work / f"cache-{name}"), "-o", str(bundle), "-q",
        ]  # fmt: skip
        subprocess.run(command, check=True, cwd=args.work)  # of a folder with an llmc in it, that one would be run
        found.append(
            Contender(f"{name} {quantize}", "llmc" if name == "after" else "baseline", "bundle", python, str(bundle))
        )
    return found


def measure(quantize: str, device: str, args: argparse.Namespace) -> Comparison:
    """Every measurement of KINDS, on the bundles that the suite measures it on."""
    whole: Comparison | None = None
    for part in PARTS:
        kinds = tuple(kind for kind in part.kinds if kind in args.kinds)
        if not kinds:
            continue
        both = contenders(quantize, device, part.flags, args)
        scope = replace(Scope(kinds=kinds), rounds=args.rounds, first_token_rounds=2 * args.rounds)
        vocabulary = int(Bundle.open(both[0].model).manifest.model["vocab_size"])
        one = compare.run(
            both, scope, model=args.model, threads=args.threads, vocabulary=vocabulary, logs=args.work / "logs",
            progress=lambda words, done, total: print(f"{done}/{total} {words}", file=sys.stderr),
        )  # fmt: skip
        if whole is None:
            whole = one
        else:
            whole.series += one.series
    if whole is None:
        raise SystemExit(f"no measurement is named in {','.join(args.kinds)}; known: {', '.join(KINDS)}")
    return whole


def worse(found: Comparison, tolerance: float) -> list[str]:
    """The measurements that lost more than `tolerance`, a share of the figure before, or that have no ratio."""
    lost = []
    for series in found.series:
        lost += [f"{name}: {series.name} was not measured: {why}" for name, why in series.missing.items()]
        for ratio in found.ratios(series):
            by = ratio.median if series.better == "less" else 1 / ratio.median
            if by > 1 + tolerance:
                lost.append(f"{ratio.ours}: {series.name} {ratio.median:.2f} of before")
    return lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, help="Python of the other version's environment")
    parser.add_argument("--model", default="smollm2-demo")
    parser.add_argument("--device", default="onnxruntime")
    parser.add_argument("--quantize", default="int8,keep")
    parser.add_argument("--kinds", default=",".join(KINDS), type=lambda names: names.split(","))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tolerance", type=float, default=0.10)
    parser.add_argument("--work", type=Path, default=Path(".bench/before-after"))
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.rounds < 2 or args.rounds % 2:
        parser.error("--rounds must be even: each version is the first of a round as often as the other")
    args.work = args.work.absolute()
    args.work.mkdir(parents=True, exist_ok=True)
    lost, results = [], {}
    for quantize in args.quantize.split(","):
        found = measure(quantize, args.device, args)
        print(text(found), flush=True)
        lost += worse(found, args.tolerance)
        results[quantize] = found.to_dict()
        if args.output:
            args.output.write_text(json.dumps(results, indent=1))
    print("\n".join(["worse than before:", *lost]) if lost else "nothing is worse than before")
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
