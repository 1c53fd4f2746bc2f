"""Servers under recorded traffic: the lengths of the Azure trace, at saturation and at three times it.

    python benchmarks/serving_load.py TRACE.csv --bundle BUNDLE [--peer-python PY --gguf FILE] [-o result.json]

Lengths are the trace's, scaled by `--scale` and cut to `--max-model-len`. Saturation is a closed loop of as many
requests at a time as llmc takes (its slots and `--queue`), which finds what the server sustains; then requests arrive
at random at `--loads` times that rate, in open loop, and latencies count from when each was due. Each server is
measured by its own saturation, one server after the other, since each takes the whole machine. llama-cpp-python's
server gets fewer requests: it answers one at a time.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

from serving_server import ServerProcess, llama_server, llmc_server

from llmc.bench.loadtest.report import Report
from llmc.bench.loadtest.report_text import text
from llmc.bench.loadtest.run import LoadTest, run
from llmc.bench.loadtest.workload import Workload

LEFT = tuple(
    f"llmc:{name}{{"
    for name in ("unplanned_compile_total", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
)
"""Metrics that are 0 when all requests are over."""


def fetch(url: str) -> str:
    with urlopen(url) as answer:
        return answer.read().decode()


def measure(server: ServerProcess, test: LoadTest, saturating: int, loads: list[float]) -> dict[str, Report]:
    """The report of the closed loop, and of each load."""
    closed = run(replace(test, workload=replace(test.workload, concurrency=saturating)))
    found = {"saturation": closed}
    print(f"\n== {server.name} sustains {closed.request_rate:.2f} requests/s\n{text(closed)}", flush=True)
    for turn, load in enumerate(loads, 1):  # other prompts each time: nothing is in a prefix cache
        rate = load * closed.request_rate
        report = run(replace(test, workload=replace(test.workload, rate=rate, seed=turn)))
        found[f"{load:g} × saturation"] = report
        print(f"\n== {server.name} at {load:g} × saturation\n{text(report)}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--peer-python")
    parser.add_argument("--gguf")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--peer-requests", type=int, default=100)
    parser.add_argument("--scale", type=float, default=1 / 8)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--saturating", type=int, default=24)
    parser.add_argument("--loads", default="3")
    parser.add_argument("--queue", type=int, default=16, help="llmc's --max-queued-requests")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--logs", default="/tmp")
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    loads = [float(part) for part in args.loads.split(",")]
    workload = Workload(
        args.requests, traffic=Path(args.trace), scale=args.scale, max_model_len=args.max_model_len,
    )  # fmt: skip
    logs = Path(args.logs)
    found: dict[str, dict[str, Report]] = {}
    ours = llmc_server(args.bundle, args.threads, logs / "llmc-serve.log", "--max-queued-requests", str(args.queue))
    try:
        found["llmc"] = measure(ours, LoadTest(ours.url, workload), args.saturating, loads)
        left = [line for line in fetch(f"{ours.url}/metrics").splitlines() if line.startswith(LEFT)]
        print("\n" + "\n".join(left))
    finally:
        code = ours.close()
    print(f"llmc serve ended with exit code {code}")
    if args.peer_python and args.gguf:
        python = str(Path(args.peer_python).absolute())
        peer = llama_server(python, args.gguf, args.threads, logs / "llama-serve.log", args.max_model_len)
        few = replace(workload, requests=min(args.peer_requests, args.requests))
        extra = {"logit_bias": {"2": -100}, "repeat_penalty": 1.0}
        try:
            found["llama-cpp-python"] = measure(peer, LoadTest(peer.url, few, extra=extra), args.saturating, loads)
        finally:
            peer.close()
    if args.output:
        documents = {name: {load: r.to_dict() for load, r in reports.items()} for name, reports in found.items()}
        Path(args.output).write_text(json.dumps(documents, indent=1))


if __name__ == "__main__":
    main()
