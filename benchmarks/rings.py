"""What rings save: memory of the cache and time of a decode step of a model whose layers have windows.

    python benchmarks/rings.py WORK [--device openvino] [--contexts 1024,4096,8192] [--rounds 5] [--steps 16] [--json]

Writes a Gemma-3-like model of random weights into WORK (five layers with a window of 512 for each that sees all), and
compiles it twice for onnxruntime or openvino in float32: windows in rings, as always, and with a place for each token,
as before. Both decode one sequence behind a context, in turns. A ratio is of rings to none, the median of rounds.
Weights are random, so nothing is verified here: the devices' tests compare the numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import random_llama
import torch
from baselines.machine import describe
from transformers import AutoModelForCausalLM

import llmc
from llmc.compiler.frontend.skeleton import model_config
from llmc.compiler.targets import open_target
from llmc.cpus import usable_cpus
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.base import Executor
from llmc.runtime.step import exact

LAYERS, EVERY, WINDOW, LONGEST = 18, 6, 512, 8704
CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 640, "intermediate_size": 2048,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "query_pre_attn_scalar": 256, "sliding_window": WINDOW, "max_position_embeddings": 32768,
    "layer_types": ["full_attention" if i % EVERY == EVERY - 1 else "sliding_attention" for i in range(LAYERS)],
    "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh", "mlp_bias": None,
}  # fmt: skip
RINGS, WHOLE = "rings", "whole"


def weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """What transformers draws, in bfloat16."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(model_config(config), dtype=torch.bfloat16)
    return {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}


def bundles(work: Path, device: str) -> dict[str, Path]:
    """Both, made where they are not there yet."""
    model = work / "model"
    if not (model / "model.safetensors").exists():
        random_llama.write(model, 0, CONFIG, weights)
    found = {name: work / f"{device}-{name}" for name in (RINGS, WHOLE)}
    target: Any = type(open_target(device))
    held = target.held_cache
    for name, path in found.items():
        if not path.exists():
            target.held_cache = held if name == RINGS else lambda _, cache, *rest: cache
            llmc.compile(
                str(model), path, device=device, quantize="none", verify="none", max_model_len=LONGEST,
                max_num_seqs=1, cache_dir=work / "store",
            )  # fmt: skip
    target.held_cache = held
    return found


def filled(path: Path, context: int) -> Executor:
    """The bundle, one slot of which has `context` tokens."""
    executor = open_executor(Bundle.open(path), 1, threads=usable_cpus())
    ids = np.random.default_rng(0).integers(0, executor.bundle.size("vocab_size"), context).tolist()
    chunk = executor.capabilities.prompt_chunk or WINDOW
    for start in range(0, context, chunk):
        executor.run(exact("prompt", [0], [ids[start : start + chunk]], [start]))
    return executor


def decode(executor: Executor, start: int, steps: int) -> float:
    """Milliseconds of a step, the median of so many."""
    times = []
    for past in range(start, start + steps):
        begun = perf_counter()
        executor.run(exact("decode", [0], [[past % 251]], [past]))
        times.append(1000 * (perf_counter() - begun))
    return median(times)


def measured(paths: dict[str, Path], context: int, rounds: int, steps: int) -> dict[str, Any]:
    """Cache bytes and milliseconds of both, and their ratio."""
    executors = {name: filled(path, context) for name, path in paths.items()}
    times: dict[str, list[float]] = {name: [] for name in paths}
    for turn in range(rounds + 1):
        for name in sorted(paths, reverse=bool(turn % 2)):
            took = decode(executors[name], context + turn * steps, steps)
            if turn:  # the first one warms up
                times[name].append(took)
    caches = {name: executor.memory()["cache"] for name, executor in executors.items()}
    for executor in executors.values():
        executor.close()
    ratio = median(a / b for a, b in zip(times[RINGS], times[WHOLE], strict=True))
    return {"context": context, "cache": caches, "step_ms": {n: median(t) for n, t in times.items()}, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--device", default="onnxruntime", choices=("onnxruntime", "openvino"))
    parser.add_argument("--contexts", default="1024,4096,8192")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    paths = bundles(args.work, args.device)
    rows = []
    for context in map(int, args.contexts.split(",")):
        print(f"decode behind {context} tokens", file=sys.stderr)
        rows.append(measured(paths, context, args.rounds, args.steps))
    print(json.dumps({"machine": describe(), "rows": rows}, indent=1) if args.json else table(rows))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows for RESULTS.md."""
    lines = [
        "| context | cache, rings | cache, a place a token | step, rings | step, a place a token | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        caches, steps = ([row[what][name] for name in (RINGS, WHOLE)] for what in ("cache", "step_ms"))
        sizes = " | ".join(f"{size / 2**20:.0f} MiB" for size in caches)
        times = " | ".join(f"{step:.1f} ms" for step in steps)
        lines.append(f"| {row['context']:,} | {sizes} | {times} | {row['ratio']:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
