"""A decode step of a mixture of experts, beside the time to read what it needs at the bandwidth that was measured.

    python benchmarks/moe.py WORK [--shapes tiny,1b] [--kernels llmc|onnxruntime] [--steps 64]

Writes a Mixtral of 8 experts, 2 for each token, with random weights into WORK, compiles it in int8 for ONNX Runtime
(once a shape and kernels), and decodes one row. What a step needs is every matrix but the embedding, and of experts
the chosen two. The ratio is of medians over rounds in which bandwidth and steps take turns: 1 is a step that does
nothing but read. A tiny model's weights stay in the caches, so its figure is the cost of a layer, not of its bytes.
Lines are rows for RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import random_llama
import roofline
import torch
from baselines.machine import describe, read_bandwidth
from onnx import ModelProto

from llmc.artifacts.bundle.reader import blob_path
from llmc.cpus import usable_cpus
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import open_executor
from llmc.runtime.step import exact

EXPERTS, CHOSEN, PAST, ROUNDS = 8, 2, 128, 5
SHAPES = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4},
    "1b": {"hidden_size": 1024, "intermediate_size": 2560, "num_hidden_layers": 16},
}
COMMON = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN,
}  # fmt: skip
PLAN = ("--max-model-len", "512", "--max-num-seqs", "1")


def weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """A Llama's tensors, with a router and experts in the place of each MLP."""
    found = random_llama.weights(config, seed)
    draw = torch.Generator().manual_seed(seed + 1)
    for name in [name for name in found if ".mlp." in name]:
        shape, stem = found.pop(name).shape, name.split(".mlp.")[0]
        which = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[name.split(".")[-2]]
        for expert in range(EXPERTS):
            matrix = torch.randn(shape, generator=draw) * random_llama.DEVIATION
            found[f"{stem}.block_sparse_moe.experts.{expert}.{which}.weight"] = matrix.to(torch.bfloat16)
        router = torch.randn(EXPERTS, config["hidden_size"], generator=draw) * random_llama.DEVIATION
        found[f"{stem}.block_sparse_moe.gate.weight"] = router.to(torch.bfloat16)
    return found


def compiled(work: Path, shape: str, kernels: str) -> Bundle:
    """The bundle of a shape, made where it is not there yet."""
    model, path = work / f"model-{shape}", work / f"bundle-{shape}-{kernels}"
    if not (model / "model.safetensors").exists():
        random_llama.write(model, 0, COMMON | SHAPES[shape], weights)
    if not path.exists():
        command = [
            sys.executable, "-m", "llmc", "compile", str(model), "--device", "onnxruntime", "--quantize", "int8",
            "--kernels", kernels, "--verify", "none", *PLAN, "-o", str(path),
        ]  # fmt: skip
        subprocess.run(command, check=True)
    return Bundle.open(path)


def needed_bytes(bundle: Bundle) -> int:
    """Bytes of weights that a step of one token needs: of experts CHOSEN of EXPERTS."""
    blob = next(e.blob for e in bundle.manifest.executables if e.phase in ("any", "decode"))
    model = ModelProto.FromString(blob_path(bundle.path, blob).read_bytes())
    experts = ModelProto.FromString(model.SerializeToString())
    del experts.graph.node[:]
    experts.graph.node.extend(node for node in model.graph.node if node.op_type in ("Experts", "MoE"))
    unread = roofline.step_bytes(experts) * (EXPERTS - CHOSEN) // EXPERTS
    return roofline.step_bytes(model) - unread


def measured(bundle: Bundle, steps: int) -> tuple[float, float, float]:
    """Medians: seconds of a decode step, bytes a second of this machine, and the step over the time to read."""
    threads, needed = usable_cpus(), needed_bytes(bundle)
    executor = open_executor(bundle, slots=1, threads=threads)
    executor.open_all()
    executor.run(exact("prompt", [0], [[1] * PAST], [0]))
    roofline.decode(executor, 1, PAST, 4)
    rounds = []
    for _ in range(ROUNDS):
        bandwidth, step = read_bandwidth(threads, rounds=3), roofline.decode(executor, 1, PAST, steps)
        rounds.append((step, bandwidth, step * bandwidth / needed))
    executor.close()
    step, bandwidth, ratio = (median(values) for values in zip(*rounds, strict=True))
    return step, bandwidth, ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--shapes", default="tiny,1b")
    parser.add_argument("--kernels", default="llmc", choices=("llmc", "onnxruntime"))
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    rows = [row(compiled(args.work, shape, args.kernels), shape, args) for shape in args.shapes.split(",")]
    if args.json:
        print(json.dumps({"machine": describe(), "rows": rows}, indent=1))
        return
    print("| model | kernels | MB a step needs | step | bandwidth | step / time to read |\n|---|---|---|---|---|---|")
    for found in rows:
        rates = f"{found['step_s'] * 1e3:.2f} ms | {found['bandwidth'] / 1e9:.1f} GB/s | {found['ratio']:.2f}"
        print(f"| {found['shape']} | {found['kernels']} | {found['bytes'] / 1e6:.1f} | {rates} |")


def row(bundle: Bundle, shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """A shape's figures: seconds, bytes, bytes a second."""
    step, bandwidth, ratio = measured(bundle, args.steps)
    return {
        "shape": shape, "kernels": args.kernels, "bytes": needed_bytes(bundle), "step_s": step,
        "bandwidth": bandwidth, "ratio": ratio,
    }  # fmt: skip


if __name__ == "__main__":
    main()
