"""Run llmc and a peer interleaved in one set of processes, and print medians and ratios.

    python benchmarks/harness.py --bundle BUNDLE [--specialised BUNDLE] --genai FOLDER --peer-python PY [-o result.json]

Every engine is a process of its own that stays open; each round asks each engine in turn, so that a machine that drifts
drifts for both. A ratio is the median over rounds of llmc's time over the peer's in the same round. Prompts are random
token ids, different in each round and the same for all engines.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
QUESTION = "What is gravity?"


class Worker:
    """One engine in its process."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE)
        self._answer()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} died: exit {self.process.wait()}")
        return json.loads(line)

    def ask(self, op: str, **args: object) -> dict:
        self.process.stdin.write(json.dumps({"op": op, "args": args}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def decode(workers: list[Worker], batch: int, rounds: int, steps: int, vocabulary: int, prompt: int) -> dict:
    """Milliseconds of a decode step by engine, the ratio to the peer, and llmc's share outside the graph."""
    found: dict[str, list[float]] = {w.name: [] for w in workers}
    outside: dict[str, list[float]] = {w.name: [] for w in workers}
    for turn in range(rounds + 1):
        ids = random.Random(turn).choices(range(vocabulary), k=prompt)
        for worker in workers:
            answer = worker.ask("decode", batch=batch, prompt=ids, steps=steps)
            if turn:
                found[worker.name].append(median(answer["steps"]) * 1e3)
                if "execute" in answer:
                    outside[worker.name].append(1 - median(answer["execute"]) / median(answer["steps"]))
    return {"ms": found, "outside": {k: median(v) for k, v in outside.items() if v}}


def prefill(workers: list[Worker], tokens: int, rounds: int, vocabulary: int) -> dict:
    found: dict[str, list[float]] = {w.name: [] for w in workers}
    for turn in range(rounds + 1):
        ids = random.Random(1000 + turn).choices(range(vocabulary), k=tokens)
        for worker in workers:
            seconds = worker.ask("prefill", prompt=ids)["seconds"]
            if turn:
                found[worker.name].append(seconds * 1e3)
    return {"ms": found}


def first_token(commands: dict[str, list[str]], rounds: int) -> dict:
    """Milliseconds from starting the process to reading its first token."""
    found: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(rounds + 1):
        for name, command in commands.items():
            start = time.perf_counter()
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            line = process.stdout.readline()
            took = time.perf_counter() - start
            process.stdin.close()
            process.wait()
            if not line:
                raise SystemExit(f"{name} printed nothing")
            if turn:
                found[name].append(took * 1e3)
    return {"ms": found}


def report(title: str, result: dict, peer: str) -> None:
    print(f"\n{title}")
    for name, values in result["ms"].items():
        ratio = ""
        if name != peer and peer in result["ms"]:
            pairs = zip(values, result["ms"][peer], strict=True)
            result.setdefault("ratio", {})[name] = value = median(a / b for a, b in pairs)
            ratio = f"  ratio to {peer} {value:.3f}"
        share = result.get("outside", {}).get(name)
        extra = f"  outside the graph {share:.1%}" if share is not None else ""
        print(f"  {name:22s} {median(values):9.2f} ms (min {min(values):.2f}, max {max(values):.2f}){ratio}{extra}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--specialised")
    parser.add_argument("--genai", required=True)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--only", help="comma-separated: decode, prefill, first-token")
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    args.peer_python = str(Path(args.peer_python).absolute())  # workers start in another folder
    wanted = set((args.only or "decode,prefill,first-token").split(","))
    absolute = {
        k: str(Path(v).absolute()) for k, v in vars(args).items() if k in ("bundle", "specialised", "genai") and v
    }
    peer = "onnxruntime-genai"
    results: dict[str, dict] = {}
    if wanted & {"decode", "prefill"}:
        workers = [Worker("llmc", [sys.executable, "worker_llmc.py", absolute["bundle"], "2"])]
        if args.specialised:
            workers.append(Worker("llmc specialised", [sys.executable, "worker_llmc.py", absolute["specialised"], "2"]))
        workers.append(Worker(peer, [args.peer_python, "worker_genai.py", absolute["genai"], "2"]))
        for worker in workers:
            worker.ask("warm")
        if "decode" in wanted:
            for batch in (1, 4):
                key = f"decode step, batch {batch}"
                results[key] = decode(workers, batch, args.rounds, args.steps, args.vocabulary, 64)
                report(key, results[key], peer)
        if "prefill" in wanted:
            results["prefill 512"] = prefill(workers, 512, args.rounds, args.vocabulary)
            report("prefill 512", results["prefill 512"], peer)
        for worker in workers:
            worker.close()
    if "first-token" in wanted:
        script = str(HERE / "first_token_llmc.py")
        commands = {"llmc": [sys.executable, script, absolute["bundle"], QUESTION]}
        if args.specialised:
            commands["llmc specialised"] = [sys.executable, script, absolute["specialised"], QUESTION]
        commands[peer] = [args.peer_python, str(HERE / "first_token_genai.py"), absolute["genai"], QUESTION]
        results["process start to first token"] = first_token(commands, args.rounds * 2)
        report("process start to first token", results["process start to first token"], peer)
    if args.output:
        Path(args.output).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
