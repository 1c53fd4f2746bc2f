"""Servers under recorded traffic: the lengths of a trace, at saturation and at three times it, by guidellm.

    python -m venv .venv-load && .venv-load/bin/pip install guidellm==0.8.1
    python benchmarks/serving_load.py TRACE --bundle BUNDLE --guidellm .venv-load/bin/guidellm \\
        [--baseline-python PY --gguf FILE] [-o result.json]

Lengths are the trace's (any that `llmc plan --traffic` reads), scaled by `--scale` and cut to `--max-model-len`;
prompts are texts of exactly so many tokens of the bundle's own tokenizer. Saturation is a closed loop of as many
requests at a time as llmc takes (its slots and `--queue`), which finds what the server sustains; then requests arrive
at random at `--loads` times that rate, in open loop. Each server is measured by its own saturation, one server after
the other, since each takes the whole machine. llama-cpp-python's server gets fewer requests: it answers one at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

from baselines.scope import recorded
from serving_server import ServerProcess, llama_server, llmc_server

from llmc.runtime.bundle import Bundle

LEFT = tuple(
    f"llmc:{name}{{"
    for name in ("unplanned_compile_total", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
)
"""Metrics that are 0 when all requests are over."""
COLUMNS = "timestamp_column=time,prompt_tokens_column=prompt_tokens,output_tokens_column=output_tokens"


class Load:
    """guidellm with the requests of a trace, in the folder `work`."""

    def __init__(self, program: str, work: Path, bundle: Bundle, lengths: list[tuple[int, int]]) -> None:
        self.program, self.work, self.count = program, work, len(lengths)
        tokenizer = work / "tokenizer"
        tokenizer.mkdir(parents=True, exist_ok=True)
        (tokenizer / "tokenizer.json").write_bytes(bundle.files.read("tokenizer.json"))
        (tokenizer / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        rows = ({"time": at, "prompt_tokens": p, "output_tokens": o} for at, (p, o) in enumerate(lengths))
        (work / "lengths.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(self, server: ServerProcess, name: str, profile: str, requests: int, seed: int = 0) -> dict:
        """One run, printed as guidellm prints it; its metrics. Other prompts for another seed."""
        result = self.work / f"{server.name}-{name}.json"
        command = [
            self.program, "run", "--backend", f"kind=openai_http,target={server.url},request_format=/v1/completions",
            "--tokenizer", f"kind=huggingface_auto,model={self.work / 'tokenizer'}", "--data",
            f"kind=trace_synthetic,source.kind=json_file,source.path={self.work / 'lengths.jsonl'},{COLUMNS}",
            "--profile", profile, "--constraint", f"kind=max_requests,count={requests}", "--seed",
            f"kind=static,value={seed}", "--output", "kind=console", "--output", f"kind=json,path={result}",
            "--disable-progress",
        ]  # fmt: skip
        print(f"\n== {server.name}, {name}", flush=True)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        subprocess.run(command, check=True, env=environment)
        (found,) = json.loads(result.read_text())["benchmarks"]
        return {"duration_s": found["duration"], "metrics": found["metrics"]}

    def both(self, server: ServerProcess, requests: int, saturating: int, loads: list[float]) -> dict[str, dict]:
        """The closed loop, and each load in open loop."""
        closed = self.run(server, "saturation", f"kind=concurrent,streams={saturating}", requests)
        rate = closed["metrics"]["request_totals"]["successful"] / closed["duration_s"]
        print(f"{server.name} sustains {rate:.2f} requests/s", flush=True)
        found = {"saturation": closed}
        for seed, load in enumerate(loads, 1):
            profile = f"kind=poisson,rate={load * rate:.4f}"
            found[f"{load:g} × saturation"] = self.run(server, f"{load:g}x", profile, requests, seed)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--guidellm", required=True)
    parser.add_argument("--baseline-python")
    parser.add_argument("--gguf")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--baseline-requests", type=int, default=100)
    parser.add_argument("--scale", type=float, default=1 / 8)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--saturating", type=int, default=24)
    parser.add_argument("--loads", default="3")
    parser.add_argument("--queue", type=int, default=16, help="llmc's --max-queued-requests")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--logs", type=Path, default=Path("/tmp"))
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    loads = [float(part) for part in args.loads.split(",")]
    lengths = recorded(args.trace, args.requests, args.scale, args.max_model_len)
    load = Load(args.guidellm, args.logs / "serving-load", Bundle.open(args.bundle), lengths)
    queue = ("--max-queued-requests", str(args.queue))
    ours = llmc_server(args.bundle, args.threads, args.logs / "llmc-serve.log", *queue)
    try:
        found = {"llmc": load.both(ours, args.requests, args.saturating, loads)}
        with urlopen(f"{ours.url}/metrics") as answer:
            print(*(line for line in answer.read().decode().splitlines() if line.startswith(LEFT)), sep="\n")
    finally:
        code = ours.close()
    print(f"llmc serve ended with exit code {code}", file=sys.stderr)
    if args.baseline_python and args.gguf:
        python = str(Path(args.baseline_python).absolute())
        baseline = llama_server(python, args.gguf, args.threads, args.logs / "llama-serve.log", args.max_model_len)
        try:
            found[baseline.name] = load.both(
                baseline, min(args.baseline_requests, args.requests), args.saturating, loads
            )
        finally:
            baseline.close()
    if args.output:
        args.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
