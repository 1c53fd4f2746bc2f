"""Ray Serve against the plain server, by turns: one replica and the same threads, then two replicas on the same CPUs.

    llmc compile smollm2-demo --device cpu --max-model-len 512 --max-num-seqs 8 -o bundle
    python benchmarks/ray_serve.py bundle --work FOLDER [--threads 2] [--requests 64] [--rounds 3] [-o result.json]

One replica is behind HAProxy, as `llmc serve --executor ray` starts it, and behind Ray's own proxy, which is there if
Serve was started before. Goal: one replica loses at most 10% of the plain server's tokens a second. Load is a closed
loop of --concurrency requests, of --prompt tokens in and --output tokens out, streamed. CPU time is of all processes
beside the load's own, and says what a server costs also on a host that is busy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ray.cluster_utils import Cluster
from serving_server import ServerProcess, free_port, llmc_server
from streaming import completion, prompt_ids


def cpu_seconds() -> float:
    """Of all processes that this one started, and theirs: what a server costs, whatever else the host does."""
    spent, parents = dict[int, float](), dict[int, int]()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = file.read_text().rpartition(")")[2].split()
            pid = int(file.parent.name)
            parents[pid], spent[pid] = int(fields[1]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def ours(pid: int) -> bool:
        return (parent := parents.get(pid, 0)) == os.getpid() or (parent > 1 and ours(parent))

    return sum(seconds for pid, seconds in spent.items() if ours(pid))


def over_ray(bundle: str, address: str, replicas: int, threads: int, log: Path, own: bool = False) -> ServerProcess:
    """`own`: behind Ray's own proxy."""
    port = free_port()
    if own:
        start = [str(Path(sys.executable).with_name("serve")), "start", "--address", address, "--http-port", str(port)]
        subprocess.run([*start, "--proxy-location", "HeadOnly"], check=True, stdout=subprocess.DEVNULL)
    command = [
        sys.executable, "-m", "llmc", "serve", bundle, "--executor", "ray", "--address", address, "--replicas",
        str(replicas), "--threads", str(threads), "--port", str(port), "--json",
    ]  # fmt: skip
    return ServerProcess(f"ray x {replicas}", command, port, "/ready", log)


def load(url: str, requested: argparse.Namespace, turn: int) -> float:
    """Tokens a second of a closed loop; `turn` 0 warms up."""

    def one(number: int) -> None:
        for _ in completion(url, prompt_ids(random.Random(f"{turn} {number}"), requested.prompt), requested.output):
            pass

    began = time.perf_counter()
    with ThreadPoolExecutor(requested.concurrency) as pool:
        list(pool.map(one, range(requested.requests if turn else 4)))
    return requested.requests * requested.output / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--work", type=Path, required=True)
    for name, default in (("threads", 2), ("requests", 64), ("concurrency", 8), ("prompt", 64), ("output", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--output-file", type=Path)
    requested = parser.parse_args()
    requested.work.mkdir(parents=True, exist_ok=True)
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - the plain server's, so that other work takes as much from both
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": requested.threads, "include_dashboard": False})
    log, address = requested.work / "server.log", cluster.address
    kinds = {
        "plain": lambda: llmc_server(requested.bundle, requested.threads, log),
        "ray x 1": lambda: over_ray(requested.bundle, address, 1, requested.threads, log),
        "ray x 1, its own proxy": lambda: over_ray(requested.bundle, address, 1, requested.threads, log, own=True),
        "ray x 2": lambda: over_ray(requested.bundle, address, 2, max(1, requested.threads // 2), log),
    }
    found: dict[str, list[dict]] = {name: [] for name in kinds}
    try:
        for turn in range(1, requested.rounds + 1):
            for name, start in kinds.items():
                server = start()
                try:
                    load(server.url, requested, 0)
                    before = cpu_seconds()
                    rate = load(server.url, requested, turn)
                    cost = 1e3 * (cpu_seconds() - before) / (requested.requests * requested.output)
                    found[name].append({"output_rate": rate, "cpu_ms_a_token": cost})
                    print(f"{name}: {rate:.1f} tokens/s, {cost:.1f} ms of CPU a token", flush=True)
                finally:
                    server.close()
    finally:
        cluster.shutdown()
    rates, costs = (
        {name: statistics.median(r[key] for r in runs) for name, runs in found.items()}
        for key in ("output_rate", "cpu_ms_a_token")
    )
    for name, rate in rates.items():
        print(
            f"{name}: {rate:.1f} tokens/s ({rate / rates['plain'] - 1:+.1%}), {costs[name]:.1f} ms of CPU a token "
            f"({costs[name] / costs['plain'] - 1:+.1%})"
        )
    if requested.output_file:
        requested.output_file.write_text(json.dumps({"rates": rates, "costs": costs, "runs": found}, indent=1))


if __name__ == "__main__":
    main()
