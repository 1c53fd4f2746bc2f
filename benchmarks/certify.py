"""Certificates of the Gaudi guide's plan: 24 prompt and 48 decode buckets, on three devices that run here.

    python benchmarks/certify.py --work FOLDER compile MODEL DEVICE
    python benchmarks/certify.py --work FOLDER certify MODEL DEVICE [--requests 2500] [--seed 0]
    python benchmarks/certify.py --work FOLDER report [-o result.json]

MODEL is smollm2 (the demo model, in float32), for the seconds of a warm-up; or small, a Llama of two layers of random
weights over 257 tokens, for thousands of requests. DEVICE is onnxruntime (specialised: an executable a bucket), xla,
openvino (specialised: one for any shape, others for decode batches), or openvino-static (a model a bucket, made for a
GPU and run on the CPU, small alone: each model holds the weights once more). Each call is a piece of some minutes;
certificates of several seeds add up.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

from models import GUIDE, LLMC
from random_llama import CONFIG, weights
from safetensors.torch import save_file

from llmc.compiler.checkpoint import DEMO
from llmc.testing.toy import EOS, VOCAB, tokenizer_json

FLAGS = {
    "onnxruntime": ("--device", "onnxruntime", "--specialise"),
    "xla": ("--device", "xla", "--dtype", "f32"),
    "openvino": ("--device", "openvino", "--specialise"),
    "openvino-static": ("--device", "openvino:GPU"),
}
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "bos_token_id": EOS, "eos_token_id": EOS,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("compile", "certify"):
        command = commands.add_parser(name)
        command.add_argument("model", choices=("smollm2", "small"))
        command.add_argument("device", choices=FLAGS)
        command.add_argument("--requests", type=int, default=2500)
        command.add_argument("--seed", type=int, default=0)
    commands.add_parser("report").add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.command != "report" and (args.model, args.device) == ("smollm2", "openvino-static"):
        parser.error("72 models of smollm2 do not fit into the memory of a small host")
    if args.command == "report":
        report(args.work, args.output)
    elif args.command == "compile":
        compile_(args.work, args.model, args.device)
    else:
        certify(args.work, args.model, args.device, args.requests, args.seed)


def compile_(work: Path, model: str, device: str) -> None:
    checkpoint = DEMO if model == "smollm2" else str(small(work / "small"))
    plan = work / f"plan-{model}.json"
    run("plan", checkpoint, *GUIDE, "-o", plan)
    run(
        "compile", checkpoint, "--plan", plan, *FLAGS[device], "--quantize", "none", "--cache-dir", work / "cache",
        "--verify", "none" if model == "smollm2" else "sample", "-o", work / f"{model}-{device}",
    )  # fmt: skip


def certify(work: Path, model: str, device: str, requests: int, seed: int) -> None:
    run(
        "warmup", work / f"{model}-{device}", "--no-finish", "--certify", work / f"{model}-{device}-{seed}.json",
        "--requests", requests, "--seed", seed, "--cache-dir", work / "cache",
    )  # fmt: skip


def small(folder: Path) -> Path:
    """The small model."""
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True)
        config = CONFIG | SMALL
        save_file(weights(config, 0), folder / "model.safetensors", {"format": "pt"})
        (folder / "tokenizer.json").write_text(tokenizer_json())
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(*words: object) -> None:
    subprocess.run([LLMC, *map(str, words)], check=True)


def report(work: Path, output: Path | None) -> None:
    found: dict[str, dict] = {}
    for file in sorted(work.glob("*-*-*.json")):
        built = json.loads(file.read_text())["certificate"]
        name = file.stem.rpartition("-")[0]
        one = found.setdefault(name, {
            "warm_up_s": [], "requests": 0, "request_s": 0.0, "tokens": 0, "compilations": 0,
            "executables": len(built["executables"]), "buckets": len(built["buckets"]), "toolchain": built["toolchain"],
        })  # fmt: skip
        one["warm_up_s"].append(built["seconds"]["warm up"])
        one["requests"] += built["requests"]["count"]
        one["request_s"] += built["seconds"]["requests"]
        one["tokens"] += built["requests"]["answer_tokens"]
        one["compilations"] += built["compilations"]
        one["by_requests"] = max(one.get("by_requests", 0), sum(bool(b["steps"]) for b in built["buckets"]))
    for name, one in found.items():
        print(
            f"{name}: {one['executables']} executables, warm up {min(one['warm_up_s']):.1f} s, compilations "
            f"{one['compilations']} in {one['requests']:,} requests ({one['tokens']:,} tokens, "
            f"{one['request_s']:.0f} s)"
        )
    if output is not None:
        output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
