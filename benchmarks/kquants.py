"""Decode steps of GGUF files of K-quants and others: llmc's `keep` and llama.cpp on the same file, taking turns.

    python benchmarks/kquants.py FILE.gguf… --baseline-python PY [--work .bench] [--devices openvino,onnxruntime]
                                 [--batches 1,4] [--rounds 7] [--steps 32] [--threads 2]

KL is of both against float32 of what the file dequantises to. A comparison of each file is kept in the work folder,
comparison-NAME.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import models
from baselines import report_text
from baselines.scope import Scope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--baseline-python", required=True)
    parser.add_argument("--work", type=Path, default=Path(".bench"))
    parser.add_argument("--devices", default="openvino,onnxruntime")
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    batches = tuple(int(batch) for batch in args.batches.split(","))
    scope = Scope(("quality", "decode"), rounds=args.rounds, batches=batches, steps=args.steps, tune=False)
    setting = models.Setting(
        args.work, args.baseline_python, args.threads, scope, on_progress=lambda words: print(words, flush=True),
        progress=lambda words, done, total: print(f"{done}/{total} {words}", flush=True),
    )  # fmt: skip
    bundles = {f"llmc {d} keep": ("--device", d, "--quantize", "keep") for d in args.devices.split(",")}
    for file in args.files:
        print(f"{file}:")
        print(report_text.text(models.run(models.Model(file.stem, str(file), bundles, "llama-cpp:as-is"), setting)))


if __name__ == "__main__":
    main()
