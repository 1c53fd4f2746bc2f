"""A decode step of models with states beside transformers', and the graphs that plans need beside a transformer's.

    python benchmarks/hybrids.py WORK [--shapes delta,mamba2,granite] [--rounds 5] [--json]

Writes models of about 0.3 billion random weights into WORK: Qwen3.5's text model (layers of the gated delta rule, each
fourth one attends), Mamba 2, and Granite 4 without experts (Mamba 2's layers, each fifth one attends). Each is compiled
for ONNX Runtime, once: in float32, verified, and in int8, not verified: random weights in so many layers are chaotic,
and fail the gate by the runtime's own kernels, too. The bundles and transformers, in float32 and bfloat16, take turns
as in `benchmarks/compare.py`. A ratio is of a bundle's step over that of the faster of transformers', the median of
rounds. Graphs are those of the Gaudi guide's plan. Lines are rows for RESULTS.md.
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
import torch
from baselines import compare
from baselines.catalogue import parse
from baselines.contenders import make_ready
from baselines.machine import describe
from baselines.scope import Scope
from models import GUIDE, LLMC
from transformers import AutoModelForCausalLM

from llmc.compiler.checkpoint import DEMO, open_checkpoint
from llmc.compiler.frontend.skeleton import model_config
from llmc.cpus import usable_cpus
from llmc.runtime.bundle import Bundle

COMMON = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True}
_INTERVAL = 5
SHAPES: dict[str, dict[str, Any]] = {
    "delta": COMMON | {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 1024,
        "intermediate_size": 2560, "num_hidden_layers": 20, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 1024, "num_hidden_layers": 36,
        "num_heads": 32, "head_dim": 64, "state_size": 128, "n_groups": 1, "expand": 2, "tie_word_embeddings": True,
    },
    "granite": COMMON | {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_size": 1024,
        "intermediate_size": 2048, "shared_intermediate_size": 2048, "num_hidden_layers": 20, "num_local_experts": 0,
        "num_experts_per_tok": 0, "mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
        "layer_types": ["attention" if i % _INTERVAL == _INTERVAL - 1 else "mamba" for i in range(20)],
    },
}  # fmt: skip
_UNREAD = {
    "delta": (), "granite": (),
    "mamba2": ("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "intermediate_size",
               "max_position_embeddings", "rope_theta", "attention_bias", "mlp_bias"),
}  # fmt: skip
"""Keys of random_llama's configuration that a model does not read."""
PLAN = ("--max-model-len", "1024", "--max-num-seqs", "8")


def weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """What transformers draws, in bfloat16."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(model_config(config), dtype=torch.bfloat16)
    return {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}


def bundles(work: Path, shape: str) -> dict[str, Path]:
    """Those of a shape by how weights are held, made where they are not there yet."""
    model = work / f"model-{shape}"
    if not (model / "model.safetensors").exists():
        random_llama.write(model, 0, {**SHAPES[shape], **dict.fromkeys(_UNREAD[shape])}, weights)
    found = {"f32": work / f"bundle-{shape}-f32", "int8": work / f"bundle-{shape}-int8"}
    for held, path in found.items():
        if not path.exists():
            command = [
                sys.executable, "-m", "llmc", "compile", str(model), "--device", "onnxruntime", "--quantize",
                *(("none",) if held == "f32" else (held, "--verify", "none")), *PLAN, "-o", str(path),
            ]  # fmt: skip
            subprocess.run(command, check=True)
    return found


def measured(work: Path, shape: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of a decode step by contender, ratios to the faster of transformers', and the decode buckets."""
    opened = {name: Bundle.open(path) for name, path in bundles(work, shape).items()}
    checkpoint = open_checkpoint(str(work / f"model-{shape}"))
    scope = Scope(("decode",), rounds, batches=(1,))
    ready = make_ready(
        opened, parse("transformers,transformers:bf16"), checkpoint, work / f"baselines-{shape}", sys.executable,
        lambda form: print(f"make {form}", file=sys.stderr), quality=False,
    )  # fmt: skip
    found = compare.run(
        ready.contenders, scope, model=shape, threads=usable_cpus(), vocabulary=ready.vocabulary, logs=work / "logs",
        progress=lambda what, done, total: None, weights=ready.weights,
    )  # fmt: skip
    (series,) = found.series
    baseline = min((name for name in series.rounds if name not in opened), key=series.median)
    return {
        "shape": shape, "weights": ready.weights, "step_ms": {name: series.median(name) for name in series.rounds},
        "baseline": baseline, "ratio": {name: median(series.ratios(name, baseline)) for name in opened},
        "missing": series.missing, "decode_graphs": graphs(str(work / f"model-{shape}")),
    }  # fmt: skip


def graphs(model: str) -> int:
    """Decode buckets of the Gaudi guide's plan."""
    command = [LLMC, "plan", model, *GUIDE, "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return len(json.loads(done.stdout)["decode"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    rows = [measured(args.work, shape, args.rounds) for shape in args.shapes.split(",")]
    transformer = graphs(DEMO)
    if args.json:
        print(json.dumps({"machine": describe(), "transformer_decode_graphs": transformer, "rows": rows}, indent=1))
        return
    print("| model | contender | decode step | / the faster of transformers' | decode graphs (a transformer's) |")
    print("|---|---|---|---|---|")
    for row in rows:
        for name, step in row["step_ms"].items():
            ratio = f"{row['ratio'][name]:.2f}" if name in row["ratio"] else ""
            counts = f"{row['decode_graphs']} ({transformer})" if name in row["ratio"] else ""
            model = f"{row['shape']}, {row['weights'] / 1e6:.0f} M"
            print(f"| {model} | {name} | {step:.1f} ms | {ratio} | {counts} |")


if __name__ == "__main__":
    main()
