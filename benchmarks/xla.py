"""XLA on CPU: opening executables, and steps against transformers in eager PyTorch and the onnxruntime target.

    python benchmarks/xla.py --work FOLDER [-o result.json]

All in float32 with the same weights, two threads each, in turn (baselines/). Bundles are compiled first, with
the same plan, where FOLDER does not have them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

from baselines import compare
from baselines.catalogue import parse
from baselines.contenders import make_ready
from baselines.report_text import text
from baselines.scope import Scope
from models import LLMC

from llmc.compiler.checkpoint import DEMO, open_checkpoint
from llmc.runtime.bundle import Bundle

PLAN = [
    "--max-model-len", "640", "--max-prompt-len", "512", "--max-num-seqs", "4", "--prompt-batch", "1,1,1",
    "--prompt-seq", "128,128,512", "--decode-batch", "1,4,4", "--decode-seq", "128,128,640",
]  # fmt: skip
BUNDLES = {
    "llmc xla": ["--device", "xla"],
    "llmc onnxruntime": ["--device", "onnxruntime", "--quantize", "none"],
}
OPENING = """
import json, sys, time
start = time.perf_counter()
from llmc.runtime.bundle import Bundle
executor = open_executor(Bundle.open(sys.argv[1]), threads=2)
ready = time.perf_counter()
times = []
for executable in executor.bundle.manifest.executables:
    at = time.perf_counter()
    executor._open(executable)
    times.append(time.perf_counter() - at)
print(json.dumps({"executor": ready - start, "each": times}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("-o", "--output", type=Path)
    requested = parser.parse_args()
    bundles = {}
    for name, flags in BUNDLES.items():
        path = requested.work / f"f32-{name.split()[1]}"
        if not path.exists():
            subprocess.run([LLMC, "compile", DEMO, *flags, *PLAN, "-o", str(path)], check=True)
        bundles[name] = Bundle.open(path)
    ready = make_ready(
        bundles, parse("transformers"), open_checkpoint(DEMO), requested.work / "baselines-demo", sys.executable, print
    )  # fmt: skip
    scope = Scope(
        kinds=("quality", "decode", "prefill"), rounds=requested.rounds, steps=requested.steps, batches=(1, 4),
        decode_prompt=100, prompts=(128, 512),
    )  # fmt: skip
    found = compare.run(
        ready.contenders, scope, model=ready.model, threads=2, vocabulary=ready.vocabulary,
        logs=requested.work / "logs",
        progress=lambda *_: None, reference=ready.reference, texts=ready.texts, weights=ready.weights,
    )  # fmt: skip
    opened = opening(requested.work / "f32-xla", requested.rounds)
    print(text(found))
    print(f"opening: {opened}")
    if requested.output:
        requested.output.write_text(json.dumps({"opening": opened, "comparison": found.to_dict()}, indent=1))


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
