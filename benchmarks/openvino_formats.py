"""Weight formats and precisions of the OpenVINO target side by side: KL to float32, equal tokens, ms, MB.

    python benchmarks/openvino_formats.py [--model smollm2-demo] [--only NAME,NAME] [--rounds 7] [-o result.json]

Each variant is the product's own graph, weights and settings (targets/openvino), run through the same requests as
the executor's. All are open in one process and take turns in every round; ratios to the first variant are medians of
per-round ratios; processor time, of all threads, stands beside wall time, since it moves less where others run.

A variant's name is QUANTIZE[/GROUP] DTYPE aACTIVATIONS cCACHE: activations are quantised in groups of so many inputs
(0: not at all), the KV cache is held in CACHE. The KL divergence is over llmc's own text (verification/texts.py), its
first half as prompts and the rest decoded token by token, against float32 throughout, which equals transformers'.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import openvino as ov

from llmc.compiler.architectures.shared.block_form import BlockForm
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.checkpoint.base import Checkpoint, stored_forms
from llmc.compiler.program.ir import Graph
from llmc.compiler.targets.openvino.formats import Constants, format_for, set_placements, to_xml
from llmc.compiler.targets.openvino.paged import PagedModel
from llmc.compiler.targets.openvino.precision import properties
from llmc.compiler.verification.accuracy import log_softmax
from llmc.compiler.weights.recipes import write_weights
from llmc.runtime.cache_shape import CacheShape
from llmc.runtime.executors.openvino.device import MappedWeights, open_core, read_paged
from llmc.runtime.executors.openvino.executor import PagedRequest
from llmc.runtime.executors.openvino.paged_cache import PagedCache, StepRows

CAPACITY = 1024
SLOTS = 8
PAST = 64


@dataclass(frozen=True)
class Variant:
    """What a model is held and computed in; None is the target's default."""

    quantize: str
    dtype: str = "f32"
    group: int | None = None
    activations: int | None = None
    cache: str | None = None

    @property
    def weights(self) -> tuple[str, str, int | None]:
        """What decides the weights file."""
        return self.quantize, "f32" if self.quantize != "none" else self.dtype, self.group

    def settings(self) -> dict[str, str]:
        """For OpenVINO."""
        return properties(self.quantize, self.dtype, self.cache, self.activations)

    def __str__(self) -> str:
        used = self.settings()
        group = f"/{self.group}" if self.group is not None else ""
        activations, cache = used["DYNAMIC_QUANTIZATION_GROUP_SIZE"], used["KV_CACHE_PRECISION"]
        return f"{self.quantize}{group} {self.dtype} a{activations} c{cache}"


REFERENCE = Variant("none")


def variants(stored: Mapping[str, BlockForm]) -> list[Variant]:
    """The first is what the others' times are compared with: openvino-genai's own choice."""
    found = [
        Variant("int8", "bf16"), Variant("int8"), Variant("int8", activations=0), Variant("int8", activations=16),
        Variant("int8", group=32), Variant("int8", "bf16", 32), Variant("int8", group=32, activations=16),
        Variant("int8", "bf16", 32, 16), Variant("int8", group=32, activations=0), Variant("int8", group=64),
        Variant("int8", group=128), Variant("int8", group=32, cache="f32"),
        Variant("none", "bf16"), Variant("none", "bf16", cache="bf16"), REFERENCE, Variant("none", cache="u8"),
        Variant("int4"), Variant("int4", "bf16"), Variant("int4", group=64),
    ]  # fmt: skip
    kept = [Variant("keep"), Variant("keep", activations=0), Variant("keep", "bf16"), Variant("keep", cache="f32")]
    return [*found, *kept] if stored else found


class Model:
    """One variant, open."""

    def __init__(self, variant: Variant, xml: bytes, weights: Path, shape: CacheShape, threads: int) -> None:
        self._weights = MappedWeights(weights)
        model = read_paged(xml, self._weights, shape, str(variant))
        settings = {**variant.settings(), "INFERENCE_NUM_THREADS": threads}
        compiled = open_core().compile_model(model, "CPU", settings)
        self.cache = PagedCache(variant.settings()["KV_CACHE_PRECISION"], shape, SLOTS, CAPACITY)
        self.request = PagedRequest(compiled, self.cache)
        self.megabytes = weights.stat().st_size / 1e6

    def step(self, tokens: list[list[int]], past: list[int], each: bool = False) -> np.ndarray:
        """Logits after the last token of each row, or after every token; row i is in slot i."""
        new = np.array([len(t) for t in tokens])
        padded = np.zeros((len(tokens), new.max()), np.int64)
        for row, ids in zip(padded, tokens, strict=True):
            row[: len(ids)] = ids
        slots, before = range(len(tokens)), np.array(past)
        for slot, start, count in zip(slots, past, new.tolist(), strict=True):
            self.cache.prepare(slot, start, start + count)
        rows = StepRows.of(padded, before, new, slots, self.cache.rows(slots, before, new))
        wanted = np.arange(len(rows.token_ids)) if each else rows.ends
        return self.request.infer(rows, wanted, 0)[0]

    def text(self, tokens: list[int]) -> np.ndarray:
        """Log probabilities after each token."""
        half = len(tokens) // 2
        first = log_softmax(self.step([tokens[:half]], [0], each=True))
        return np.concatenate(
            [first, *(log_softmax(self.step([[t]], [half + i])) for i, t in enumerate(tokens[half:]))]
        )

    def decode(self, batch: int, steps: int, random: np.random.Generator) -> tuple[float, float]:
        """Wall and processor milliseconds of a step, the medians of `steps`."""
        took = []
        for i in range(steps):
            tokens = [[t] for t in random.integers(0, 1000, batch).tolist()]
            took.append(timed(lambda t=tokens, i=i: self.step(t, [PAST + i] * batch)))
        return median(t[0] for t in took), median(t[1] for t in took)

    def prefill(self, count: int, random: np.random.Generator) -> tuple[float, float]:
        """Wall and processor milliseconds of one prompt in one step."""
        tokens = random.integers(0, 1000, count).tolist()
        return timed(lambda: self.step([tokens], [0]))


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor milliseconds of a call."""
    start = time.perf_counter(), time.process_time()
    call()
    return (time.perf_counter() - start[0]) * 1e3, (time.process_time() - start[1]) * 1e3


def build(graph: Graph, checkpoint: Checkpoint, variant: Variant, folder: Path) -> tuple[bytes, Path]:
    """A variant's model and its weights file, in `folder`."""
    folder.mkdir()
    constants = Constants()
    model = PagedModel(graph, format_for(*variant.weights, stored_forms(checkpoint))(constants)).model
    with (folder / "weights").open("wb") as out:
        placed = write_weights(constants.recipes, checkpoint, constants.tables, out)
    return set_placements(to_xml(model, folder), placed).encode(), folder / "weights"


def run(checkpoint: Checkpoint, chosen: list[Variant], rounds: int, steps: int, threads: int) -> dict[str, dict]:
    """Every figure of every variant."""
    from llmc.compiler.architectures.shared.caches import cache_of
    from llmc.compiler.frontend.trace import trace
    from llmc.compiler.program.fuse import fuse
    from llmc.compiler.program.import_fx import import_program
    from llmc.compiler.verification.texts import TEXTS
    from llmc.runtime.text.tokenizer import Tokenizer

    shape = cache_of(checkpoint.config)
    graph = fuse(import_program(trace(checkpoint.config, "fused"), CAPACITY, shape))
    encode = Tokenizer(checkpoint.tokenizer_json()).encode
    texts = [encode(t) for t in TEXTS.values()]
    result: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as name:
        built: dict[tuple, tuple[bytes, Path]] = {}
        for v in (REFERENCE, *chosen):
            if v.weights not in built:
                built[v.weights] = build(graph, checkpoint, v, Path(name) / str(len(built)))
        reference = Model(REFERENCE, *built[REFERENCE.weights], shape, threads)
        wanted = np.concatenate([reference.text(t) for t in texts])
        del reference
        models = {}
        for v in chosen:
            models[str(v)] = model = Model(v, *built[v.weights], shape, threads)
            got = np.concatenate([model.text(t) for t in texts])
            kl = (np.exp(wanted) * (wanted - got)).sum(-1)
            result[str(v)] = {
                "tokens": len(kl), "kl": float(kl.mean()), "p99": float(np.quantile(kl, 0.99)),
                "top1": float((wanted.argmax(-1) == got.argmax(-1)).mean()), "megabytes": model.megabytes,
                "ms": {},
            }  # fmt: skip
        for turn in range(rounds + 1):
            for named, model in models.items():
                random = np.random.default_rng(turn)
                works = {f"decode {b}": (lambda m=model, b=b, r=random: m.decode(b, steps, r)) for b in (1, 4, 8)}
                works["prefill 512"] = lambda m=model, r=random: m.prefill(512, r)
                for work, call in works.items():
                    took = call()
                    if turn:
                        result[named]["ms"].setdefault(work, []).append(took)
    return result


def report(result: dict[str, dict]) -> str:
    """A Markdown table; beside milliseconds, the ratio to the first row, of wall and of processor time."""
    first = next(iter(result.values()))["ms"]
    lines = [
        "| variant | KL | p99 | top-1 | weights, MB | " + " | ".join(first) + " |",
        "|" + "---|" * (5 + len(first)),
    ]
    for name, r in result.items():
        cells = [name, f"{r['kl']:.5f}", f"{r['p99']:.3f}", f"{r['top1']:.1%}", f"{r['megabytes']:.0f}"]
        for work, took in r["ms"].items():
            wall, processor = (
                median(a[i] / b[i] for a, b in zip(took, first[work], strict=True)) for i in (0, 1)
            )  # fmt: skip
            cells.append(f"{median(t[0] for t in took):.1f} ({wall:.2f}, {processor:.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-demo")
    parser.add_argument("--only", help="comma-separated names of variants, the first to compare with")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    checkpoint = open_checkpoint(args.model)
    known = {str(v): v for v in variants(stored_forms(checkpoint))}
    names = args.only.split(",") if args.only else list(known)
    if unknown := [n for n in names if n not in known]:
        parser.error(f"unknown variants {', '.join(unknown)}; known: {', '.join(known)}")
    result = run(checkpoint, [known[n] for n in names], args.rounds, args.steps, args.threads)
    if args.output:
        facts = {"openvino": ov.__version__, "threads": args.threads, "rounds": args.rounds}
        Path(args.output).write_text(json.dumps({"facts": facts, "variants": result}, indent=1))
    print(report(result))


if __name__ == "__main__":
    main()
