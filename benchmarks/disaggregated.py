"""The cost of the KV transfer, the gain of disaggregated prefill, and the predictions of `llmc plan --disaggregated`.

    python benchmarks/disaggregated.py prepare            compiles both bundles   2 minutes
    python benchmarks/disaggregated.py link               KV transfer of 1,024 tokens by each transport   1 minute
    python benchmarks/disaggregated.py steps --threads N  seconds of each bucket, and of steps at once   2 minutes
    python benchmarks/disaggregated.py serve --threads N  throughput: each device alone, and the pair   4 minutes
    python benchmarks/disaggregated.py report [-o OUT.json]  measured and predicted

Prompts run on OpenVINO and decode steps on ONNX Runtime, SmolLM2-135M in int8. With 2 threads on a host of 2 cores,
both are the same machine (shared). With 1 thread each has a core of its own: two devices (apart), compared with one
core. Prediction uses `link`, `steps` and the devices alone; the pair's own figures are only compared with.
Alone, an engine takes other times than the sum of its steps (sampling, chunks between decode steps): `calibrated`
scales each device's steps by that ratio. The goal is an error of the calibrated prediction below 15%.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from llmc.bench.bucket_times import measure
from llmc.buckets.bucket import Bucket
from llmc.buckets.cost.bench import Bench
from llmc.buckets.disaggregated.device import Link, Sharing, Stage
from llmc.buckets.disaggregated.simulate import alone, pipeline
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.step_time import BenchStepTime, StepTime
from llmc.compiler.checkpoint import DEMO
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.kv_transfer import KVTransfer
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors import open_executor
from llmc.runtime.llm import BundleLLM
from llmc.runtime.step import pad

PREFILL, DECODE = "openvino", "onnxruntime"
SLOTS = 4
PLAN = (
    "--max-model-len", "1280", "--max-num-seqs", str(SLOTS), "--prompt-batch", "1,1,1", "--prompt-seq", "128,128,1152",
    "--decode-batch", "1,1,4", "--decode-seq", "256,256,1280",
)  # fmt: skip
WORKLOADS = ((128, 128), (512, 64), (1024, 16))
"""Prompt and output tokens."""
REQUESTS = 12
HANDED = 1024
SAMPLES = 12


def prepare(args: argparse.Namespace) -> None:
    """Both bundles, from one plan."""
    for device in (PREFILL, DECODE):
        command = [
            sys.executable, "-m", "llmc", "compile", args.model, "--device", device, "--quantize", "int8", *PLAN,
            "--verify", "none", "-o", str(args.work / device),
        ]  # fmt: skip
        subprocess.run(command, check=True)


def link(args: argparse.Namespace) -> None:
    """Seconds and GB/s of handing a prompt of HANDED tokens over."""
    found = {"in-process": _handed(args, str(args.work / PREFILL))}
    with tempfile.TemporaryDirectory() as folder:
        for name, listen in (("unix socket", f"unix:{folder}/s"), ("tcp loopback", "127.0.0.1:0")):
            with _prefill_server(args.work / PREFILL, listen) as address:
                found[name] = _handed(args, address)
    for name, one in found.items():
        print(f"{name}: {one['bytes'] / 1e6:.1f} MB, {1e3 * one['seconds']:.1f} ms, {one['gb_per_s']:.2f} GB/s")
    _save(args, "link", found)


def _handed(args: argparse.Namespace, prefill: str) -> dict[str, float]:
    costs: list[KVTransfer] = []
    with BundleLLM(args.work / DECODE, threads=2, prefill=prefill, enable_prefix_caching=False) as llm:
        for prompt in _prompts(SAMPLES + 1, HANDED, seed=1):
            handed = llm.generate([prompt], _sampling(1), use_tqdm=False)[0].timings.kv_transfer
            assert handed is not None
            costs.append(handed)
    seconds = median(cost.moving_s for cost in costs[1:])
    size = costs[-1].bytes
    return {"bytes": size, "seconds": seconds, "gb_per_s": size / seconds / 1e9}


@contextmanager
def _prefill_server(bundle: Path, listen: str) -> Iterator[str]:
    command = [sys.executable, "-m", "llmc", "prefill", str(bundle), "--listen", listen, "--threads", "2", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        reported = json.loads(process.stdout.readline())
        try:
            yield str(reported["address"])
        finally:
            process.terminate()


def steps(args: argparse.Namespace) -> None:
    """Bench files of both, and how much steps at once get in each other's way."""
    for device in (PREFILL, DECODE):
        measure(Bundle.open(args.work / device), seconds=0.4, threads=args.threads).save(
            args.work / f"{device}-{args.threads}.json"
        )
    factor = _contention(args)
    print(f"{args.threads} threads: two steps at once take {factor:.2f} × the sum of their times")
    _save(args, f"contention-{args.threads}", factor)


def _contention(args: argparse.Namespace) -> float:
    """Of a prompt of 512 tokens there and a decode step of SLOTS here, each over and over."""
    prompt, decode = Bucket("prompt", 1, 512, 0), Bucket("decode", SLOTS, 1, 512)
    runs = [_Loop(args, PREFILL, prompt), _Loop(args, DECODE, decode)]
    single = [one.seconds(3.0) for one in runs]
    together: list[float] = [0.0, 0.0]

    def run(at: int) -> None:
        together[at] = runs[at].seconds(6.0)

    threads = [threading.Thread(target=run, args=(at,)) for at in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in runs:
        one.executor.close()
    return 1 / sum(one / both for one, both in zip(single, together, strict=True))


class _Loop:
    def __init__(self, args: argparse.Namespace, device: str, bucket: Bucket) -> None:
        bundle = Bundle.open(args.work / device)
        self.executor, self._bucket = open_executor(bundle, threads=args.threads), bucket
        self._past = bucket.context // 2
        for slot in range(bucket.batch):
            empty = self.executor.export_prefix(slot, 0)
            shapes = [(t.shape[0], self._past, t.shape[2]) for t in empty]
            self.executor.import_prefix(slot, [np.zeros(shape, np.float32) for shape in shapes])

    def seconds(self, budget: float) -> float:
        """Mean of a step, over so many seconds."""
        rows = range(self._bucket.batch)
        tokens = [[7] * self._bucket.query for _ in rows]
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < budget:
            self.executor.run(pad(self._bucket, rows, tokens, [self._past] * self._bucket.batch))
            count += 1
        return (time.perf_counter() - began) / count


def serve(args: argparse.Namespace) -> None:
    """New tokens a second of each, in turn, over rounds."""
    kinds: dict[str, tuple[Path, str | None]] = {
        PREFILL: (args.work / PREFILL, None), DECODE: (args.work / DECODE, None),
        "disaggregated": (args.work / DECODE, str(args.work / PREFILL)),
    }  # fmt: skip
    found: dict[str, dict[str, list[float]]] = {name: {} for name in kinds}
    for turn in range(args.rounds):
        order = list(kinds) if turn % 2 == 0 else list(reversed(kinds))
        for name in order:
            bundle, prefill = kinds[name]
            with BundleLLM(bundle, threads=args.threads, prefill=prefill, enable_prefix_caching=False) as llm:
                for prompt, output in WORKLOADS:
                    llm.generate(_prompts(SLOTS, prompt, seed=99), _sampling(4), use_tqdm=False)
                    given = _prompts(REQUESTS, prompt, seed=turn)
                    began = time.perf_counter()
                    llm.generate(given, _sampling(output), use_tqdm=False)
                    rate = REQUESTS * output / (time.perf_counter() - began)
                    found[name].setdefault(_label(prompt, output), []).append(rate)
        _save(args, f"serve-{args.threads}", found)
    for name, rates in found.items():
        print(name, {label: f"{median(some):.1f} tokens/s" for label, some in rates.items()})


@dataclass(frozen=True)
class Scaled:
    """Step times, each `factor` times as long."""

    times: StepTime
    factor: float

    def prompt(self, lengths: Sequence[int], cached: Sequence[int]) -> float:
        return self.factor * self.times.prompt(lengths, cached)

    def decode(self, batch: int, longest: int, total: int) -> float:
        return self.factor * self.times.decode(batch, longest, total)


def report(args: argparse.Namespace) -> None:
    """Measured beside predicted, for each number of threads that was measured."""
    way = _load(args, "link")["in-process"]
    over = Link(round(way["bytes"] / HANDED), way["gb_per_s"])
    rows: list[dict[str, Any]] = []
    for threads in (1, 2):
        if not (args.work / f"serve-{threads}.json").exists():
            continue
        contention = float(_load(args, f"contention-{threads}"))
        sharing = Sharing(True, max(0.5, contention)) if threads > 1 else Sharing()
        rows += [_row(args, threads, prompt, output, over, sharing) for prompt, output in WORKLOADS]
    print("threads workload openvino onnxruntime pair gain | predicted gain, tokens/s, error; calibrated, error")
    for row in rows:
        print(
            f"{row['threads']}  {row['workload']:>9}  {row['alone'][0]:8.1f}  {row['alone'][1]:8.1f}  "
            f"{row['disaggregated']:8.1f}  {row['gain']:.2f} | {row['predicted_gain']:.2f}  {row['predicted']:8.1f}  "
            f"{row['error']:+.0%}  {row['calibrated']:8.1f}  {row['calibrated_error']:+.0%}"
        )
    if args.output is not None:
        args.output.write_text(json.dumps({"link": _load(args, "link"), "rows": rows}, indent=1) + "\n")


def _row(
    args: argparse.Namespace, threads: int, prompt: int, output: int, over: Link, sharing: Sharing
) -> dict[str, Any]:
    measured = _load(args, f"serve-{threads}")
    rates = [median(measured[name][_label(prompt, output)]) for name in (PREFILL, DECODE, "disaggregated")]
    times = [BenchStepTime(Bench.load(args.work / f"{name}-{threads}.json").rising()) for name in (PREFILL, DECODE)]
    requests = [TrafficRequest(0.0, prompt, output)] * REQUESTS
    plain = [Stage(name, one) for name, one in zip((PREFILL, DECODE), times, strict=True)]
    singles = [alone(requests, one, SLOTS).tokens_per_s for one in plain]
    scaled = [
        Stage(one.name, Scaled(one.times, guess / rate))
        for one, guess, rate in zip(plain, singles, rates[:2], strict=True)
    ]
    predicted, calibrated = (pipeline(requests, *both, over, SLOTS, sharing).tokens_per_s for both in (plain, scaled))
    return {
        "threads": threads, "workload": _label(prompt, output), "alone": rates[:2], "disaggregated": rates[2],
        "gain": rates[2] / max(rates[:2]), "predicted": predicted, "predicted_alone": singles,
        "predicted_gain": predicted / max(singles), "error": predicted / rates[2] - 1,
        "calibrated": calibrated, "calibrated_error": calibrated / rates[2] - 1,
        "sharing": "shared" if sharing.shared else "apart", "contention": sharing.contention,
    }  # fmt: skip


def _label(prompt: int, output: int) -> str:
    return f"{prompt}+{output}"


def _prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(100, 40_000, (count, tokens)).tolist()


def _sampling(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def _save(args: argparse.Namespace, name: str, found: Any) -> None:
    (args.work / f"{name}.json").write_text(json.dumps(found) + "\n")


def _load(args: argparse.Namespace, name: str) -> Any:
    return json.loads((args.work / f"{name}.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "link", "steps", "serve", "report"))
    parser.add_argument("--work", type=Path, default=Path(".bench/disaggregated"))
    parser.add_argument("--model", default=DEMO)
    parser.add_argument("--threads", type=int, default=2, help="of each device: 1 apart, 2 shared")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("-o", dest="output", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    globals()[args.what](args)


if __name__ == "__main__":
    main()
