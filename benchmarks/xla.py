"""XLA on CPU: opening executables, and steps against transformers in eager PyTorch and the onnxruntime target.

    python benchmarks/xla.py --work FOLDER [-o result.json]

All in float32 with the same weights, two threads each, interleaved (see harness.py). Bundles are compiled first, with
the same plan, where FOLDER does not have them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

from harness import HERE, Worker, decode, prefill

MODEL = "smollm2-demo"
PLAN = [
    "--max-model-len", "640", "--max-prompt-len", "512", "--max-num-seqs", "4", "--prompt-batch", "1,1,1",
    "--prompt-seq", "128,128,512", "--decode-batch", "1,4,4", "--decode-seq", "128,128,640",
]  # fmt: skip
DEVICES = {"xla": ["--device", "xla"], "onnxruntime": ["--device", "cpu", "--quantize", "none"]}
OPENING = """
import json, sys, time
start = time.perf_counter()
from llmc.runtime.bundle import Bundle
executor = Bundle.open(sys.argv[1]).executor(threads=2)
ready = time.perf_counter()
times = []
for executable in executor.bundle.manifest.executables:
    at = time.perf_counter()
    executor._open(executable)
    times.append(time.perf_counter() - at)
print(json.dumps({"executor": ready - start, "each": times}))
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    bundles = {name: asked.work / f"f32-{name}" for name in DEVICES}
    for name, flags in DEVICES.items():
        if not bundles[name].exists():
            command = ["llmc", "compile", MODEL, *flags, *PLAN, "-o", str(bundles[name])]
            subprocess.run([str(Path(sys.executable).with_name("llmc")), *command[1:]], check=True)
    found = {"opening": opening(bundles["xla"], asked.rounds)}
    workers = [
        Worker(name, [sys.executable, str(HERE / "worker_llmc.py"), str(path), "2"]) for name, path in bundles.items()
    ]
    workers.append(Worker("transformers", [sys.executable, str(HERE / "worker_transformers.py"), MODEL, "2"]))
    for worker in workers[:2]:
        worker.ask("warm")
    for batch in (1, 4):
        found[f"decode {batch}"] = decode(workers, batch, asked.rounds, asked.steps, 49000, 100)["ms"]
    for tokens in (128, 512):
        found[f"prefill {tokens}"] = prefill(workers, tokens, asked.rounds, 49000)["ms"]
    for worker in workers:
        worker.close()
    for name, times in found.items():
        if name != "opening":
            shown = ", ".join(f"{engine} {median(ms):.1f}" for engine, ms in times.items())
            ratios = {
                peer: median(a / b for a, b in zip(times["xla"], times[peer], strict=True))
                for peer in ("transformers", "onnxruntime")
            }
            print(f"{name}: {shown} ms; xla is {', '.join(f'{r:.2f} x {p}' for p, r in ratios.items())}", flush=True)
    print(f"opening: {found['opening']}")
    if asked.output:
        asked.output.write_text(json.dumps(found, indent=1))


def opening(bundle: Path, rounds: int) -> dict[str, float]:
    """Seconds, medians over processes: the executor with weights and slot programs, then an executable."""
    runs = []
    for _ in range(rounds):
        done = subprocess.run([sys.executable, "-c", OPENING, str(bundle)], capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout))
    return {
        "executor": round(median(r["executor"] for r in runs), 3),
        "first executable": round(median(r["each"][0] for r in runs), 3),
        "executable": round(median(t for r in runs for t in r["each"]), 3),
    }


if __name__ == "__main__":
    main()
