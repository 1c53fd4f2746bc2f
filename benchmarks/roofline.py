"""Which share of this machine's memory bandwidth a decode step uses, and of its 8-bit arithmetic a prompt step.

    python benchmarks/roofline.py BUNDLE [BUNDLE …] [--batches 1,4,8] [--prompts 512,2048] [-o result.json]

The share of a decode step is that of `benchmarks/compare.py` and goals.py: the time to read the weights once, at
their nominal bits, at the bandwidth that was measured at the beginning, over the step's. What the bundle's kernels
really read (the packed form, scales) is beside it. Arithmetic is measured with ONNX Runtime's MatMulInteger, the
fastest product of 8-bit integers that it has; a prompt step has two operations for each weight and token, those of
attention not counted. Products and steps take turns in every round; shares are medians of per-round shares.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from baselines.baseline_models import weights_read
from baselines.contenders import nominal_bits
from baselines.machine import read_bandwidth
from onnx import ModelProto, TensorProto, helper

from llmc.artifacts.bundle.reader import blob_path
from llmc.compiler.checkpoint import open_checkpoint
from llmc.cpus import usable_cpus
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.base import Executor
from llmc.runtime.executors.onnxruntime.session import open_session
from llmc.runtime.step import exact

LOOKED_UP = ("Gather", "GatherBlockQuantized", "GroupQueryAttention", "Embedding", "Attention", "AddNorm")


class Arithmetic:
    """Multiplies 8-bit integers with every core."""

    def __init__(self, size: int = 2048, rows: int = 256) -> None:
        weight = np.random.default_rng(0).integers(-127, 128, (size, size)).astype(np.int8)
        model = helper.make_model(
            helper.make_graph(
                [helper.make_node("MatMulInteger", ["x", "w"], ["y"])], "product",
                [helper.make_tensor_value_info("x", TensorProto.UINT8, [rows, size])],
                [helper.make_tensor_value_info("y", TensorProto.INT32, [rows, size])],
                [helper.make_tensor("w", TensorProto.INT8, weight.shape, weight.tobytes(), raw=True)],
            ),
            opset_imports=[helper.make_opsetid("", 21)], ir_version=10,
        )  # fmt: skip
        self.session = open_session(model.SerializeToString())
        self.x = np.ones((rows, size), np.uint8)
        self.operations = 2 * rows * size * size

    def measure(self) -> float:
        """Operations a second; a multiplication and an addition are two."""
        start = time.perf_counter()
        for _ in range(4):
            self.session.run(None, {"x": self.x})
        return 4 * self.operations / (time.perf_counter() - start)


def weight_bytes(bundle: Bundle) -> int:
    """Bytes of weights that a decode step reads: of ONNX graphs what their matrices read, else the weights file."""
    manifest = bundle.manifest
    if "onnxruntime" not in manifest.toolchain:
        return int(manifest.blobs[manifest.files["weights"]])
    blob = next(e.blob for e in manifest.executables if e.phase in ("any", "decode"))
    return step_bytes(ModelProto.FromString(blob_path(bundle.path, blob).read_bytes()))


def step_bytes(model: ModelProto) -> int:
    """Bytes of weights that a step of a few tokens reads: packed where there is a packed form; look-ups not."""
    offsets = {t.name: {e.key: e.value for e in t.external_data} for t in model.graph.initializer}
    total = 0
    for node in model.graph.node:
        if node.op_type in LOOKED_UP or len(node.input) < 2:
            continue
        packed = [v for k, v in offsets.get(node.input[1], {}).items() if k.startswith("prepacked")]
        if packed:
            total += sum(int(blob.split(";")[1]) for entry in packed for blob in entry.split("|")[1:])
        else:
            total += sum(int(offsets[name]["length"]) for name in node.input if "length" in offsets.get(name, {}))
    return total


def matrix_weights(bundle: Bundle) -> int:
    """Weights that every token of a prompt is multiplied with: all but the head's, which runs for the last token."""
    checkpoint = open_checkpoint(bundle.manifest.provenance["model"])
    names = [n for n in checkpoint.tensor_names() if not n.startswith(("model.embed_tokens", "lm_head"))]
    return sum(math.prod(shape) for shape in map(checkpoint.shape, names) if len(shape) == 2)


def nominal_bytes(bundle: Bundle) -> float:
    """Bytes of the weights that a decode step reads at their nominal bits, as `Comparison.roofline_s` counts them."""
    checkpoint = open_checkpoint(bundle.manifest.provenance["model"])
    bits = nominal_bits(bundle.manifest, checkpoint)
    if bits is None:
        raise SystemExit(f"{bundle.path}: how many bits a weight has is not known")
    return weights_read(checkpoint) * bits / 8


def decode(executor: Executor, batch: int, past: int, steps: int) -> float:
    """Seconds of a decode step of `batch` rows with `past` tokens, the median of `steps`."""
    took = []
    ids = np.random.default_rng(batch).integers(0, 1000, (steps, batch, 1)).tolist()
    for i in range(steps):
        step = exact("decode", range(batch), ids[i], [past + i] * batch)
        start = time.perf_counter()
        executor.run(step)
        took.append(time.perf_counter() - start)
    return median(took)


def prefill(executor: Executor, tokens: int) -> float:
    """Seconds of a prompt in the executor's own chunks."""
    chunk = executor.capabilities.prompt_chunk or tokens
    ids = np.random.default_rng(tokens).integers(0, 1000, tokens).tolist()
    start = time.perf_counter()
    for at in range(0, tokens, chunk):
        executor.run(exact("prompt", [0], [ids[at : at + chunk]], [at]))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+")
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--prompts", default="512")
    parser.add_argument("--past", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    batches, prompts = ([int(n) for n in text.split(",") if n] for text in (args.batches, args.prompts))
    threads = usable_cpus()
    bandwidth, arithmetic = read_bandwidth(threads), Arithmetic()
    results: dict[str, dict] = {}
    for path in args.bundles:
        bundle = Bundle.open(path)
        executor = open_executor(bundle, slots=max(batches), threads=threads)
        executor.open_all()
        for slot in range(max(batches)):
            executor.run(exact("prompt", [slot], [[1] * args.past], [0]))
        weights, nominal, multiplied = weight_bytes(bundle), nominal_bytes(bundle), matrix_weights(bundle)
        phases: dict[str, tuple[Callable[[], float], Callable[[], float], float]] = {}
        for b in batches:
            phases[f"decode, batch {b}"] = (partial(decode, executor, b, args.past, 16), lambda: bandwidth, nominal)
        for n in prompts:
            phases[f"prefill {n}"] = (partial(prefill, executor, n), arithmetic.measure, 2 * multiplied * n)
        results[path] = {"weight_bytes": weights, "nominal_bytes": nominal, "phases": run(phases, args.rounds)}
        print(f"\n{path}: {nominal / 1e6:.1f} MB of weights at their nominal bits; kernels read {weights / 1e6:.1f} MB")
        for name, r in results[path]["phases"].items():
            unit = "GB/s" if name.startswith("decode") else "Gop/s"
            print(f"  {name:18s} {r['ms']:8.2f} ms   {r['peak'] / 1e9:7.1f} {unit} there are, {r['share']:.0%} used")
        executor.close()
    if args.output:
        Path(args.output).write_text(json.dumps(results, indent=1))


def run(phases: dict[str, tuple], rounds: int) -> dict[str, dict[str, float]]:
    """Medians over rounds in which every phase and its limit take a turn; the first round does not count."""
    seen: dict[str, list[tuple[float, float, float]]] = {name: [] for name in phases}
    for turn in range(rounds + 1):
        for name, (work, limit, amount) in phases.items():
            peak, seconds = limit(), work()
            if turn:
                seen[name].append((seconds * 1e3, peak, amount / seconds / peak))
    return {
        name: dict(zip(("ms", "peak", "share"), map(median, zip(*values, strict=True)), strict=True))
        for name, values in seen.items()
    }


if __name__ == "__main__":
    main()
