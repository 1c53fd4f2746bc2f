"""Seconds and memory of compiling a large checkpoint of random weights, each stage included, verification too.

    python benchmarks/large.py --work FOLDER [--shape 1b|7b] [--device onnxruntime] [--quantize int8|int4]
                               [--max-model-len 2048] [--max-num-seqs 4] [-o result.json]

1b: 22 layers, hidden 2048, 32 heads over 4 of keys and values, MLP 5632 (1.07 billion parameters). 7b: 32 layers,
hidden 4096, 32 heads, MLP 11008 (6.7 billion). Weights are bfloat16, a shard a layer, made once in FOLDER. The process
and its children are looked at ten times a second: `rss` counts the pages of mapped files, which the system takes back
when it needs them, `anonymous` is what it cannot take back.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from models import LLMC
from random_llama import CONFIG, DEVIATION, EMBEDDING_DEVIATION, describe
from safetensors.torch import save_file

SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 64,
    },
    "7b": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "head_dim": 128,
    },
}  # fmt: skip


def write(out: Path, changes: dict[str, Any]) -> None:
    """The checkpoint, a shard at a time."""
    config = describe(out, changes)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kept = (config[name] * dim for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        "self_attn.q_proj": (query, hidden), "self_attn.k_proj": (kept, hidden), "self_attn.v_proj": (kept, hidden),
        "self_attn.o_proj": (hidden, query), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    draw = torch.Generator().manual_seed(0)

    def normal(shape: tuple[int, int], deviation: float) -> torch.Tensor:
        return (torch.randn(shape, generator=draw) * deviation).to(torch.bfloat16)

    def shards() -> Iterator[dict[str, torch.Tensor]]:
        ones = {"model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16)}
        yield {"model.embed_tokens.weight": normal((config["vocab_size"], hidden), EMBEDDING_DEVIATION)} | ones
        for layer in range(config["num_hidden_layers"]):
            built = {f"{name}.weight": normal(shape, DEVIATION) for name, shape in shapes.items()}
            norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
            built |= {name: torch.ones(hidden, dtype=torch.bfloat16) for name in norms}
            yield {f"model.layers.{layer}.{name}": tensor for name, tensor in built.items()}

    files: dict[str, str] = {}
    for number, tensors in enumerate(shards()):
        file = f"model-{number:05}.safetensors"
        save_file(tensors, out / file, {"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def tree(process: int) -> Iterator[int]:
    """A process and all below it."""
    yield process
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from tree(int(child))


def memory(process: int) -> tuple[int, int]:
    """Bytes of RssTotal and RssAnon of a process and all below it."""
    found = [0, 0]
    for one in tree(process):
        status = Path(f"/proc/{one}/status").read_text()
        for at, field in enumerate(("VmRSS", "RssAnon")):
            match = re.search(rf"{field}:\s+(\d+)", status)
            found[at] += 1024 * int(match[1]) if match else 0
    return found[0], found[1]


def watched(command: list[str]) -> dict[str, Any]:
    """What the command prints as JSON, its seconds, and the most memory that it had."""
    start, most = time.perf_counter(), (0, 0)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        while running.poll() is None:
            try:
                now = memory(running.pid)
            except (FileNotFoundError, ProcessLookupError):  # a child ended as it was looked at
                continue
            most = (max(most[0], now[0]), max(most[1], now[1]))
            time.sleep(0.1)
        assert running.stdout is not None
        printed = running.stdout.read()
    if running.returncode:
        took = f"{time.perf_counter() - start:.0f} s, {most[0] / 1e9:.2f} GB with mapped files, {most[1] / 1e9:.2f} GB"
        raise SystemExit(f"{' '.join(command)} ended with {running.returncode} after {took} without")
    return json.loads(printed) | {
        "process_seconds": round(time.perf_counter() - start, 1), "rss": most[0], "anonymous": most[1],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--device", default="onnxruntime")
    parser.add_argument("--quantize", default="int8")
    parser.add_argument("--max-model-len", default="2048")
    parser.add_argument("--max-num-seqs", default="4")
    parser.add_argument("--verify", default="sample")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    model = args.work / args.shape
    if not (model / "model.safetensors.index.json").exists():
        print(f"writing {model}", flush=True)
        write(model, CONFIG | SHAPES[args.shape])
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    cache, out = args.work / "cache", args.work / f"bundle-{os.getpid()}"
    shutil.rmtree(cache, ignore_errors=True)
    found = watched([
        LLMC, "compile", str(model), "--device", args.device, "--quantize", args.quantize, "--max-model-len",
        args.max_model_len, "--max-num-seqs", args.max_num_seqs, "--verify", args.verify, "--cache-dir", str(cache),
        "-o", str(out), "--json", "-q",
    ])  # fmt: skip
    bundle = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    shutil.rmtree(out)
    shutil.rmtree(cache)
    found |= {"checkpoint": size, "bundle": bundle}
    stages = {name: round(seconds, 1) for name, seconds in found["stages"].items()}
    print(
        f"{args.shape} {args.device} {args.quantize}: {found['process_seconds']} s {stages}; checkpoint "
        f"{size / 1e9:.2f} GB, bundle {bundle / 1e9:.2f} GB; most memory {found['rss'] / 1e9:.2f} GB with mapped "
        f"files ({(found['rss'] - 1.5e9) / bundle:.2f} × the bundle + 1.5 GB), {found['anonymous'] / 1e9:.2f} GB "
        "without"
    )
    if args.output:
        args.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
