"""Continuous batching against peers: tokens a second of 8 streams and of 1, all engines in one interleaved run.

    python benchmarks/serving.py --bundle BUNDLE --peer-python PY [--genai FOLDER] [--gguf FILE] [-o result.json]

Each round asks every engine in turn for the same answers: `--streams` distinct random prompts of `--prompt` tokens,
`--tokens` generated for each. A ratio is the median over rounds of the peer's seconds over llmc's in the same round:
above 1 llmc is the faster. The bundle has to run `--streams` sequences. For llmc two more figures are printed: its
efficiency, the seconds of its steps replayed with no engine around them over its own, and its overhead, the part of its
time outside the graphs. llama-cpp-python's server is asked over HTTP, by the client of `llmc bench serve`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from statistics import median

from harness import Worker
from serving_server import llama_server

from llmc.runtime.loadtest.run import LoadTest, run
from llmc.runtime.loadtest.workload import Workload

OURS, HTTP = "llmc", "llama-cpp-python server"
EOS = "2"


def ask_server(url: str, turn: int, streams: int, prompt: int, tokens: int) -> dict:
    """The server's answers; its end token is biased away, since it has no ignore_eos.

    It does not count tokens, and a piece of its text may hold several: answers that ended by length count in full.
    """
    workload = Workload(streams, prompt_len=(prompt,) * 2, output_len=(tokens,) * 2, concurrency=streams, seed=turn)
    report = run(LoadTest(url, workload, warmup=0, extra={"logit_bias": {EOS: -100}, "repeat_penalty": 1.0}))
    counts = [o.asked_output if o.finish_reason == "length" else o.tokens for o in report.outcomes if o.ok]
    return {"seconds": report.duration_s, "tokens": sum(counts)}


def measure(workers: list[Worker], url: str | None, streams: int, args: argparse.Namespace) -> dict[str, list[dict]]:
    """Every engine's answers of every round but the first."""
    found: dict[str, list[dict]] = {}
    for turn in range(args.rounds + 1):
        draw = random.Random(1000 * streams + turn)
        prompts = [draw.choices(range(args.vocabulary), k=args.prompt) for _ in range(streams)]
        for worker in workers:
            answer = worker.ask("generate", prompts=prompts, tokens=args.tokens)
            if worker.name == OURS:
                worker.ask("record", prompts=prompts, tokens=args.tokens)
                answer["bare_s"] = worker.ask("bare")["seconds"]
            if turn:
                found.setdefault(worker.name, []).append(answer)
        if url is not None and turn:
            found.setdefault(HTTP, []).append(ask_server(url, turn, streams, args.prompt, args.tokens))
    return found


def summary(found: dict[str, list[dict]], expected: int) -> dict:
    ours = found[OURS]
    result: dict[str, dict] = {}
    for name, answers in found.items():
        rates = [a["tokens"] / a["seconds"] for a in answers]
        one = {"tokens_per_s": median(rates), "all": rates, "tokens": answers[0]["tokens"]}
        if name != OURS:
            ratios = [r["tokens"] / r["seconds"] / rate for r, rate in zip(ours, rates, strict=True)]
            one["llmc_over_it"] = median(ratios)
        if any(a["tokens"] != expected for a in answers):
            one["short"] = [a["tokens"] for a in answers]
        result[name] = one
    result[OURS] |= {
        "efficiency": median(a["bare_s"] / a["seconds"] for a in ours),
        "outside_graphs": median(1 - a["execute_s"] / a["seconds"] for a in ours),
        "steps": ours[0]["steps"],
        "compilations": max(a["compilations"] for a in ours),
    }
    return result


def show(title: str, result: dict) -> None:
    print(f"\n{title}")
    for name, one in result.items():
        extra = ""
        if name == OURS:
            extra = (
                f"  efficiency {one['efficiency']:.3f}, outside the graphs {one['outside_graphs']:.1%}, "
                f"{one['steps']} steps, {one['compilations']} compilations"
            )
        elif "llmc_over_it" in one:
            extra = f"  llmc over it {one['llmc_over_it']:.2f}×"
        if "short" in one:
            extra += f"  ended early: {one['short']} tokens"
        low, high = min(one["all"]), max(one["all"])
        print(f"  {name:26s} {one['tokens_per_s']:8.1f} tokens/s ({low:.1f} … {high:.1f}){extra}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--genai", help="onnxruntime-genai's model folder")
    parser.add_argument("--gguf", help="for openvino-genai and llama.cpp; see serving_gguf.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--no-server", action="store_true", help="leave out llama-cpp-python's server")
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    python = str(Path(args.peer_python).absolute())
    threads = str(args.threads)
    workers = [Worker(OURS, [sys.executable, "serving_llmc.py", str(Path(args.bundle).absolute()), threads])]
    if args.genai:
        folder = str(Path(args.genai).absolute())
        workers.append(Worker("onnxruntime-genai", [python, "serving_genai.py", folder, threads]))
    server = None
    if args.gguf:
        gguf = str(Path(args.gguf).absolute())
        workers.append(Worker("openvino-genai", [python, "serving_openvino.py", gguf, threads]))
        workers.append(Worker("llama.cpp, one batch", [python, "serving_llama.py", gguf, threads]))
        if not args.no_server:
            server = llama_server(python, gguf, args.threads, Path("/tmp/llama-server.log"))
    results = {}
    try:
        warmed = [worker.ask("warm") for worker in workers]
        for streams in map(int, args.streams.split(",")):
            if streams > warmed[0]["sequences"]:
                raise SystemExit(f"the bundle runs {warmed[0]['sequences']} sequences, not {streams}")
            url = None if server is None else server.url
            found = measure(workers, url, streams, args)
            title = f"{streams} streams, {args.prompt} prompt and {args.tokens} generated tokens each"
            results[title] = summary(found, streams * args.tokens)
            show(title, results[title])
    finally:
        for worker in workers:
            worker.close()
        if server is not None:
            server.close()
    if args.output:
        Path(args.output).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
