"""The two backends for NVIDIA GPUs against transformers and other servers' kernels, on one GPU, in one run.

    python benchmarks/cuda_bakeoff.py --gpu h100 -o bakeoff.json            both shapes: an hour or two
    python benchmarks/cuda_bakeoff.py --device cpu --shape tiny --quick      the same code, on a host without a GPU

Weights are random, in bfloat16, of the shapes of Llama 3.2 1B and Llama 3.1 8B. Nothing is downloaded. Measured are
decode steps at batch 1, 8 and 64, prompts of 512 and 2,048 tokens, exec to ready with an empty and with a filled cache,
and 48 decode graphs. Contenders: llmc's backends, cuda (XLA) and inductor (CUDA graphs); transformers over a static
cache, eager and with torch.compile(mode="reduce-overhead"); vLLM and SGLang where they are installed; and a copy of as
many bytes as the step has to read, which is the memory roofline. All are open in processes of their own and take turns
in every round. A share of the roofline, and a speed over transformers, are medians of the rounds' own ratios.

It needs torch 2.11 to 2.13 with CUDA 13, transformers and, for the backend cuda, llmc's extra `cuda`. A contender whose
packages are missing, that does not fit the GPU, or that fails is a line "not run", with the reason. The weights of all
that are open lie on the GPU at once: 8B wants 141 GB; on a smaller GPU, --only some of them. The results are written
after each part; an interrupt keeps them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from bakeoff import gpu, report
from bakeoff.shapes import SHAPES, Points, Shape
from baselines.measure import Measurer
from baselines.scope import Scope
from baselines.worker import Contender, Worker

import llmc
from llmc.artifacts.store.store import Store
from llmc.buckets.plan import Plan
from llmc.cpus import usable_cpus
from llmc.errors import LlmcError

ENGINES = Path(__file__).parent / "bakeoff" / "engines"
QUICK = Points(batches=(1,), context=16, steps=2, prompts=(16,), graphs=1)
ROOM = 32
"""Tokens that engines with a fixed cache get beyond what is measured."""


def backends(device: str, name: str) -> dict[str, str]:
    """Contender → what llmc compiles for. On a CPU, XLA's own takes the place of its GPU's."""
    return {"llmc xla": "xla", "llmc inductor": "inductor"} if device == "cpu" else {
        "llmc cuda": f"cuda:{name}", "llmc inductor": "inductor",
    }  # fmt: skip


class Bakeoff:
    """All measurements of one shape; `found` is filled as they are made."""

    def __init__(self, shape: Shape, points: Points, requested: argparse.Namespace) -> None:
        self.shape, self.points, self.requested = shape, points, requested
        self.folder = requested.work / shape.name
        self.logs = self.folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.found: dict[str, Any] = {"series": {}, "ready": {}, "graphs": {}, "compile_s": {}, "missing": {}}
        self.targets = backends(requested.device, requested.gpu)

    def wanted(self, name: str) -> bool:
        """Whether a contender takes part; why an installed one does not is in `missing`."""
        if self.requested.only and name not in self.requested.only:
            return False
        if why := gpu.lacking(name, self.requested.device):
            self.found["missing"][name] = why
        return name not in self.found["missing"]

    def run(self, parts: Sequence[str], saved: Any) -> None:
        """Make what is measured, then measure it; `saved` is called after each part."""
        self.model = self.shape.write(self.folder / "model", self.requested.device)
        _release(self.requested.device)
        saved()
        if "decode" in parts:
            bundles = self.bundles("decode", self.points.decode_plan())
            length = self.points.context + self.points.steps + ROOM
            contenders = self.contenders(bundles, self.points.batches, length, roofline=True)
            self.timed("decode", contenders, saved)
            if "ready" in parts:
                self.ready([c for c in contenders if c.name != report.ROOFLINE], saved)
            if "graphs" in parts:
                self.graphs(bundles, saved)
        if "prefill" in parts:
            bundles = self.bundles("prefill", self.points.prefill_plan())
            self.timed("prefill", self.contenders(bundles, (1,), max(self.points.prompts) + ROOM), saved)

    def bundles(self, part: str, plan: Plan) -> dict[str, Path]:
        """Each backend's bundle, compiled on the target where it is here; a backend that fails is missing."""
        built = {}
        for name, device in self.targets.items():
            if not self.wanted(name):
                continue
            path = self.folder / f"{part}-{device.partition(':')[0]}"
            began = time.perf_counter()
            try:
                if not path.exists():
                    llmc.compile(
                        self.model, path, device=device, plan=plan, dtype=self.requested.dtype, verify="none",
                        store=Store(self.folder / "store"),
                    )  # fmt: skip
                    self.found["compile_s"].setdefault(name, {})[part] = time.perf_counter() - began
            except LlmcError as e:
                self.found["missing"][name] = str(e)
            else:
                built[name] = path
        _release(self.requested.device)
        return built

    def contenders(
        self, bundles: Mapping[str, Path], batches: Sequence[int], length: int, roofline: bool = False
    ) -> list[Contender]:  # fmt: skip
        """Who takes part, for sequences of `length` tokens in batches of these sizes."""
        device, at = self.requested.device, str(self.model)
        sizes = {"batches": list(batches), "length": length}
        torch_model = {"device": device, **sizes}
        most = self.shape.step_bytes(max(batches), length)
        others: dict[str, tuple[str, dict[str, Any]]] = {
            "transformers eager": ("torch_model", {**torch_model, "compiled": False}),
            "transformers reduce-overhead": ("torch_model", {**torch_model, "compiled": True}),
        }
        if device != "cpu":
            server = {**sizes, "share": self.requested.server_memory}
            others |= {name: ("generating", {**server, "server": name}) for name in ("vllm", "sglang")}
        if roofline:
            moved = {"weight_bytes": self.shape.step_bytes(0, 0), "kv_bytes": self.shape.kv_bytes, "most": most}
            others[report.ROOFLINE] = "copying", {"device": device, **moved}
        here = [
            self._contender(name, "backend", str(path), {"here": device != "cpu"}, "llmc")
            for name, path in bundles.items()
        ]
        baselines = {name: how for name, how in others.items() if self.wanted(name)}
        return here + [self._contender(name, engine, at, options) for name, (engine, options) in baselines.items()]

    def _contender(
        self, name: str, engine: str, model: str, options: Mapping[str, Any], kind: Any = "baseline"
    ) -> Contender:
        return Contender(name, kind, str(ENGINES / engine), sys.executable, model, options, 16)

    def timed(self, kind: str, contenders: Sequence[Contender], saved: Any) -> None:
        """Rounds in which all contenders take turns; what is there of them is kept when they are interrupted."""
        points = self.points
        scope = Scope(
            (kind,), self.requested.rounds, points.batches, points.context, points.steps, points.prompts, tune=False
        )
        measurer = Measurer(
            contenders, scope, usable_cpus(), self.shape.config["vocab_size"], self.logs, self.requested.progress
        )
        try:
            measurer.steps()
        finally:
            self.found["series"] |= {s.name: report.of_series(s) for s in measurer.series}
            self.found.setdefault("versions", {}).update(
                {name: about.get("versions", {}) for name, about in measurer.abouts.items()}
            )
            saved()

    def ready(self, contenders: Sequence[Contender], saved: Any) -> None:
        """Seconds from starting a process to the end of its first decode step, warmed up as a server is."""
        seconds: dict[str, dict[str, list[float]]] = {"cold cache": {}, "warm cache": {}}
        self.found["ready"] = seconds
        for turn in range(self.requested.rounds):
            for contender in contenders:
                with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                    for found in seconds.values():
                        if contender.name in self.found["missing"]:
                            continue
                        try:
                            took = self._start(contender, folder)
                        except LlmcError as e:
                            self.found["missing"][f"{contender.name}, exec to ready"] = str(e)
                            break
                        found.setdefault(contender.name, []).append(took)
                self.requested.progress(f"exec to ready: {contender.name}", turn, self.requested.rounds)
            saved()

    def _start(self, contender: Contender, caches: str) -> float:
        began = time.perf_counter()
        log = self.logs / f"ready-{contender.name.replace(' ', '-')}.log"
        with Worker(contender, usable_cpus(), log, caches_in=caches) as worker:
            worker.ask("warm")
            worker.ask("decode", prompts=[[1] * self.points.context], steps=1)
            return time.perf_counter() - began

    def graphs(self, bundles: Mapping[str, Path], saved: Any) -> None:
        """Seconds and bytes of each decode graph of each backend."""
        for name, path in bundles.items():
            contender = self._contender(name, "graphs", str(path), {}, "llmc")
            try:
                with Worker(contender, usable_cpus(), self.logs / f"graphs-{path.name}.log") as worker:
                    reported = worker.ask("graphs")
            except LlmcError as e:
                self.found["missing"][f"{name}, graphs"] = str(e)
            else:
                self.found["graphs"][name] = {
                    **reported,
                    "rows": reported["graphs"],
                    **report.of_graphs(reported["graphs"]),
                }
            saved()


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpu", default="h100", help="the topology of the backend cuda, as in cuda:h100")
    parser.add_argument("--shape", action="append", choices=list(SHAPES), help="again for each; default: 1B and 8B")
    parser.add_argument("--only", action="append", help="a contender's name; again for each")
    parser.add_argument("--parts", default="decode,ready,graphs,prefill")
    parser.add_argument("--dtype", default="bf16", help="of llmc's backends; f32 is for a CPU")
    parser.add_argument("--server-memory", type=float, default=0.3, help="share of the GPU for vLLM and for SGLang")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="the fewest points, to see it run")
    parser.add_argument("--work", type=Path, default=Path(".bench/cuda"))
    parser.add_argument("--fresh", action="store_true", help="compile and draw weights again")
    parser.add_argument("-o", "--output", type=Path)
    requested = parser.parse_args(arguments)
    requested.progress = lambda words, done, total: print(f"\r{words}: {done}/{total}", end="\033[K", file=sys.stderr)
    if requested.fresh:
        shutil.rmtree(requested.work, ignore_errors=True)
    require_gpu(requested.device)
    found: dict[str, Any] = {"machine": gpu.machine(requested.device), "shapes": {}, "unfinished": []}

    def save() -> None:
        if requested.output is not None:
            requested.output.write_text(json.dumps(found, indent=1) + "\n")

    for name in requested.shape or ("llama-1b", "llama-8b"):
        one = Bakeoff(SHAPES[name], QUICK if requested.quick else Points(), requested)
        found["shapes"][name] = one.found
        try:
            one.run(requested.parts.split(","), save)
        except KeyboardInterrupt:
            found["unfinished"].append(f"the rest of {name}")
            break
    save()
    print("\n" + report.text(found))
    return found


def _release(device: str) -> None:
    """Give back what this process holds of the GPU, so that the contenders have it."""
    if device != "cpu":
        import torch

        torch.cuda.empty_cache()


def require_gpu(device: str) -> None:
    """Exit with what is missing where nothing at all could be measured."""
    if device == "cpu":
        return
    try:
        import torch
    except ImportError:
        raise SystemExit("torch is not installed: it draws the weights and measures the GPU's memory") from None
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA GPU; --device cpu --shape tiny --quick runs the same code without one")


if __name__ == "__main__":
    main()
