"""Weight formats of the ONNX Runtime target side by side: KL to float32, equal tokens, milliseconds, bytes a step.

    python benchmarks/ort_variants.py [--model smollm2-demo] [--only NAME,NAME] [--rounds 5] [-o result.json]

Each variant is the product's own graph and weights (llmc/compiler/program), packed for this host, run through the same
bindings as the executor's. All are open in one process and take turns in every round; ratios to the first variant are
medians of per-round ratios. `--busy` measures one thread's processor time instead, for a machine that others use. The
KL divergence is over every position of llmc's own text (compiler/verification/texts.py) against the float32 graph,
which equals transformers'; prefill runs in chunks of the executor's size.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from roofline import step_bytes

from llmc.compiler.architectures.shared.block_form import BlockForm
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.program.ir import Graph
from llmc.compiler.targets.onnxruntime.formats import OnnxOptions
from llmc.runtime.host import PROMPT_CHUNK

CAPACITY = 1024
BATCHES = (1, 4, 8)
Rows = np.ndarray


class Variant:
    """One lowered model, open, with a cache of its own for as many rows as asked."""

    busy = False

    def __init__(self, name: str, graph: Graph, checkpoint, options: OnnxOptions, folder: Path, **edits) -> None:
        from llmc.compiler.targets.onnxruntime.onnx_model import set_placements
        from llmc.compiler.targets.onnxruntime.packing import pack_weights
        from llmc.compiler.targets.onnxruntime.to_onnx import to_onnx
        from llmc.compiler.weights.recipes import write_weights
        from llmc.runtime.executors.onnxruntime.session import open_session

        self.name = name
        folder.mkdir()
        lowered = to_onnx(graph, options)
        if "model" in edits:
            edits["model"](lowered.model)
        with (folder / "plain").open("wb") as out:
            placed = write_weights(lowered.recipes, checkpoint, lowered.tables, out)
        offsets = {n: {"offset": p.offset, "length": p.length} for n, p in placed.items()}
        file = folder / "plain"
        if options.block:
            (folder / "work").mkdir()
            file, offsets = pack_weights(
                lowered.model.SerializeToString(), file, offsets, folder / "work", lowered.folded
            )
        model = set_placements(lowered.model, file.name, offsets)
        where = {"session__model_external_initializers_file_folder_path": str(file.parent)}
        self.session = open_session(model.SerializeToString(), 1 if self.busy else None, **where)
        self.bytes = step_bytes(model)
        shapes = {i.name: i.shape for i in self.session.get_inputs()}
        self.layers = sum(name.startswith("past_k") for name in shapes)
        self.heads, self.head_dim = shapes["past_k0"][1], shapes["past_k0"][3]
        self.vocabulary = self.session.get_outputs()[0].shape[1]
        self.caches: dict[int, np.ndarray] = {}

    def bound(self, batch: int, query: int, rows: int):
        cache = self.caches.setdefault(
            batch, np.zeros((2 * self.layers, batch, self.heads, CAPACITY, self.head_dim), np.float32)
        )
        arrays = {
            "token_ids": np.zeros((batch, query), np.int64), "past_lengths": np.zeros(batch, np.int64),
            "logit_rows": np.arange(rows, dtype=np.int64), "logits": np.zeros((rows, self.vocabulary), np.float32),
        }  # fmt: skip
        binding = self.session.io_binding()
        for name, array in arrays.items():
            bind = binding.bind_output if name == "logits" else binding.bind_input
            bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for i, view in enumerate(cache):
            for bind, name in ((binding.bind_input, "past"), (binding.bind_output, "present")):
                bind(f"{name}_{'kv'[i % 2]}{i // 2}", "cpu", 0, np.float32, view.shape, view.ctypes.data)
        arrays["logit_rows"][:] = np.arange(rows) if rows > batch else (np.arange(rows) + 1) * query - 1
        return binding, arrays

    def clock(self) -> float:
        return time.process_time() if self.busy else time.perf_counter()

    def logits(self, tokens: list[int]) -> Rows:
        """After each token of one sequence, in one step."""
        binding, arrays = self.bound(1, len(tokens), len(tokens))
        arrays["token_ids"][:] = tokens
        self.session.run_with_iobinding(binding)
        return arrays["logits"]

    def decode(self, batch: int, steps: int, past: int = 64) -> float:
        """Milliseconds of a step, the median of `steps`."""
        binding, arrays = self.bound(batch, 1, batch)
        took = []
        for i in range(steps):
            arrays["past_lengths"][:] = past + i
            arrays["token_ids"][:] = np.random.default_rng(i).integers(0, self.vocabulary, (batch, 1))
            start = self.clock()
            self.session.run_with_iobinding(binding)
            took.append(self.clock() - start)
        return median(took) * 1e3

    def prefill(self, tokens: int, chunk: int = PROMPT_CHUNK) -> float:
        """Milliseconds of one prompt."""
        ids = np.random.default_rng(tokens).integers(0, self.vocabulary, tokens)
        start = self.clock()
        for at in range(0, tokens, chunk):
            binding, arrays = self.bound(1, min(chunk, tokens - at), 1)
            arrays["token_ids"][:] = ids[at : at + chunk]
            arrays["past_lengths"][:] = at
            self.session.run_with_iobinding(binding)
        return (self.clock() - start) * 1e3


def log_softmax(x: Rows) -> Rows:
    x = x.astype(np.float64) - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def variants(stored: Mapping[str, BlockForm], fold: bool) -> dict[str, OnnxOptions]:
    """Name → options; `stored` are the checkpoint's own blocks."""
    built = {"f32": OnnxOptions(0)}
    built |= {f"int8 block {b}": OnnxOptions(b) for b in (16, 32, 64, 128, 256)}
    heads = ("model.embed_tokens.weight", "lm_head.weight")
    four = {n: t for n, t in stored.items() if t.bits == 4}
    kept = four | {n: t for n, t in stored.items() if n in heads}
    own = {f"int4 block {b}, own": OnnxOptions(b, bits=4, fold=fold) for b in (16, 32, 64)}
    built |= own | {"int4 block 32, own, head 4": replace(own["int4 block 32, own"], lm_head_bits=4)}
    if stored:
        built["keep"] = OnnxOptions(32, stored=stored, fold=fold)
        built["keep, offsets apart"] = OnnxOptions(32, stored=stored)
    if four:
        built["int4"] = OnnxOptions(32, bits=4, stored=kept, fold=fold)
        built["int4, head 4"] = OnnxOptions(32, bits=4, lm_head_bits=4, stored=four, fold=fold)
    return built


def main() -> None:
    from llmc.compiler.checkpoint.base import stored_forms
    from llmc.compiler.frontend.trace import trace
    from llmc.compiler.program.fuse import fuse
    from llmc.compiler.program.import_fx import import_program
    from llmc.compiler.targets.onnxruntime.packing import folds_offsets
    from llmc.compiler.verification.texts import TEXTS
    from llmc.runtime.text.tokenizer import Tokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-demo")
    parser.add_argument("--only", help="comma-separated names of variants; float32 is always there")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    Variant.busy = args.busy
    checkpoint = open_checkpoint(args.model)
    graph = fuse(import_program(trace(checkpoint.config, "fused"), CAPACITY))
    found = variants(stored_forms(checkpoint), folds_offsets())
    if args.only:
        found = {n: o for n, o in found.items() if n in (args.only.split(",")) or n == "f32"}
    encode = Tokenizer(checkpoint.tokenizer_json()).encode
    texts = [encode(t) for t in TEXTS.values()]
    print(report(run(graph, checkpoint, found, texts, args.rounds, args.steps, args.output)))


def run(graph, checkpoint, found, texts, rounds, steps, output=None, edits=None) -> dict[str, dict]:
    """Every figure of every variant; `edits` may change a variant's ONNX model before it is packed."""
    result: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        built = [
            Variant(n, graph, checkpoint, o, Path(folder) / str(i), **(edits or {}).get(n, {}))
            for i, (n, o) in enumerate(found.items())
        ]
        wanted = None
        for v in built:
            got = log_softmax(np.concatenate([v.logits(t) for t in texts]))
            wanted = got if wanted is None else wanted
            kl = (np.exp(wanted) * (wanted - got)).sum(-1)
            equal = float((wanted.argmax(-1) == got.argmax(-1)).mean())
            result[v.name] = {"kl": float(kl.mean()), "top1": equal, "megabytes": v.bytes / 1e6, "ms": {}}
        works = {f"decode {b}": (lambda v, b=b: v.decode(b, steps)) for b in BATCHES}
        works["prefill 512"] = lambda v: v.prefill(512)
        for turn in range(rounds + 1):
            for v in built[1:]:
                for work, call in works.items():
                    took = call(v)
                    if turn:
                        result[v.name]["ms"].setdefault(work, []).append(took)
    if output:
        Path(output).write_text(json.dumps(result, indent=1))
    return result


def report(result: dict[str, dict]) -> str:
    """A table."""
    first = next(r for r in result.values() if r["ms"])
    lines = ["variant                        KL        top-1   MB/step   " + "".join(f"{w:>20}" for w in first["ms"])]
    for name, r in result.items():
        line = f"{name:28s} {r['kl']:8.5f}  {r['top1']:6.1%}  {r['megabytes']:7.1f}   "
        for work, took in r["ms"].items():
            ratio = median(a / b for a, b in zip(took, first["ms"][work], strict=True))
            line += f"  {median(took):8.2f} ms ({ratio:.2f})"
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
