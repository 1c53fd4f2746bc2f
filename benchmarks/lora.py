"""What adapters that requests choose cost: time of prompts and of decode steps, beside a bundle without adapters.

    python benchmarks/lora.py WORK [--device openvino] [--model MODEL] [--quantize int8] [--adapters 8] [--rank 8]
                              [--batches 1,8] [--prompt 128] [--steps 16] [--rounds 7] [--json]

Writes adapters of random numbers for q, k, v and o into WORK, and compiles the model with them and without. Both
bundles run the same prompts and decode steps in turns; in the one with adapters each row has another one. A ratio is of
that to the bundle without, the median of rounds. Nothing is verified here, which `llmc compile` does.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from baselines.machine import describe
from safetensors.numpy import save_file

import llmc
from llmc.compiler.checkpoint import DEMO, open_checkpoint
from llmc.cpus import usable_cpus
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.base import Executor
from llmc.runtime.step import exact, ragged

PLAIN, CHOSEN = "without adapters", "with adapters"
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")


def write_adapter(folder: Path, model: str, rank: int, seed: int) -> Path:
    """One that changes what a weight gives by about a tenth."""
    if (folder / "adapter_config.json").exists():
        return folder
    checkpoint, draw = open_checkpoint(model), np.random.default_rng(seed)
    tensors: dict[str, Any] = {}
    for layer in range(int(checkpoint.config["num_hidden_layers"])):
        for module in MODULES:
            name = f"model.layers.{layer}.self_attn.{module}"
            weight = checkpoint.tensor(f"{name}.weight")
            rows, width = weight.shape
            size = 0.1 * weight.std() / rank**0.5
            tensors[f"base_model.model.{name}.lora_A.weight"] = draw.normal(0, 1, (rank, width)).astype(np.float32)
            tensors[f"base_model.model.{name}.lora_B.weight"] = draw.normal(0, size, (rows, rank)).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


def bundles(work: Path, args: argparse.Namespace) -> dict[str, Path]:
    """Both, made where they are not there yet."""
    adapters = {
        f"adapter-{i}": write_adapter(work / f"rank-{args.rank}" / f"{i}", args.model, args.rank, i)
        for i in range(args.adapters)
    }
    found = {}
    for name, chosen in ((PLAIN, {}), (CHOSEN, adapters)):
        held = f"{args.device}-{args.quantize}-{len(chosen)}-{args.rank if chosen else 0}"
        path = found[name] = work / held.replace(":", "-")
        if not path.exists():
            llmc.compile(
                args.model, path, device=args.device, quantize=args.quantize, verify="none", lora_modules=chosen,
                max_model_len=args.prompt + args.steps * (args.rounds + 1) + 1, max_num_seqs=max(args.batches),
                cache_dir=work / "store",
            )  # fmt: skip
    return found


def run(executor: Executor, slots: Sequence[int], tokens: Sequence[Sequence[int]], past: int) -> float:
    """Seconds of the rows: of one step, or where rows of a prompt run alone, of as many."""
    phase = "prompt" if len(tokens[0]) > 1 else "decode"
    adapters = [1 + slot % len(executor.bundle.adapters) if executor.bundle.adapters else 0 for slot in slots]
    together = (
        [range(len(slots))]
        if executor.capabilities.ragged or phase == "decode"
        else [[row] for row in range(len(slots))]
    )
    make, begun = ragged if executor.capabilities.ragged else exact, perf_counter()
    for rows in together:
        step = make(phase, [slots[r] for r in rows], [tokens[r] for r in rows], [past] * len(rows))  # type: ignore[arg-type]
        executor.run(replace(step, adapters=tuple(adapters[r] for r in rows)))
    return perf_counter() - begun


def measured(paths: dict[str, Path], batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of both, and their ratios, for so many rows."""
    executors = {name: open_executor(Bundle.open(path), batch, threads=usable_cpus()) for name, path in paths.items()}
    draw = np.random.default_rng(0)
    prompts = draw.integers(10, 1000, (batch, args.prompt)).tolist()
    times: dict[str, dict[str, list[float]]] = {what: {name: [] for name in paths} for what in ("prompt", "decode")}
    for turn in range(args.rounds + 1):
        for name in sorted(paths, reverse=bool(turn % 2)):
            executor, slots = executors[name], range(batch)
            prompt = run(executor, slots, prompts, 0)
            steps = [run(executor, slots, [[7]] * batch, args.prompt + i) for i in range(args.steps)]
            if turn:  # the first one warms up
                times["prompt"][name].append(1000 * prompt)
                times["decode"][name].append(1000 * median(steps))
    for executor in executors.values():
        executor.close()
    return {
        "batch": batch,
        **{
            what: {
                "ms": {name: median(found) for name, found in took.items()},
                "ratio": median(a / b for a, b in zip(took[CHOSEN], took[PLAIN], strict=True)),
            }
            for what, took in times.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--device", default="onnxruntime", choices=("onnxruntime", "openvino"))
    parser.add_argument("--model", default=DEMO)
    parser.add_argument("--quantize", default="int8")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    paths = bundles(args.work, args)
    sizes = {name: Bundle.open(path).manifest.size for name, path in paths.items()}
    rows = []
    for batch in args.batches:
        print(f"{batch} rows on {args.device}", file=sys.stderr)
        rows.append(measured(paths, batch, args))
    found = {"machine": describe(), "bytes": sizes, "rows": rows}
    print(json.dumps(found, indent=1) if args.json else table(args.device, sizes, rows))


def table(device: str, sizes: dict[str, int], rows: Sequence[dict[str, Any]]) -> str:
    """Rows for RESULTS.md."""
    lines = [
        f"| | rows | prompt, {PLAIN} | {CHOSEN} | ratio | decode step, {PLAIN} | {CHOSEN} | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [f"{row[what]['ms'][name]:.1f} ms" for what in ("prompt", "decode") for name in (PLAIN, CHOSEN)]
        cells[2:2], cells[5:5] = [f"{row['prompt']['ratio']:.2f}"], [f"{row['decode']['ratio']:.2f}"]
        lines.append(f"| {device} | {row['batch']} | {' | '.join(cells)} |")
    held = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in sizes.items())
    return "\n".join([*lines, "", f"Bundles: {held}."])


if __name__ == "__main__":
    main()
