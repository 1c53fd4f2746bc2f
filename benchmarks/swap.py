"""A re-plan and swap under load: failed requests, and the time between tokens in the swap's window against steady.

    python benchmarks/swap.py BUNDLE [--to OTHER] [--rounds 3] [--clients 4] [--steady 30] [-o result.json]

Clients stream completions one after the other. After `--steady` seconds OTHER is swapped in, then BUNDLE again, and so
on; without OTHER `llmc loop` plans once for the traffic so far, compiles beside the server (by `nice`) and swaps,
whatever it gains. A window is from there until the old bundle is closed. Goals: no request fails, and p99 between
tokens in the window is at most twice that of the steady seconds before it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from serving_server import fetch_metric, llmc_server
from streaming import StreamError, completion

TOKEN = "benchmark"
DRAIN_S = 600.0
PROMPT = "In the year of the great flood the people of the valley moved to the hills. Number "


class Load:
    """Streams until `over`. `gaps`: (when it ended, seconds) between two tokens of a stream; `failed`: why."""

    def __init__(self, url: str, clients: int, tokens: int) -> None:
        self.over, self.gaps, self.failed, self.ok = threading.Event(), [], [], 0
        self._url, self._tokens = url, tokens
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(clients)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        turn = 0
        while not self.over.is_set():
            turn += 1
            try:
                self._stream(f"{PROMPT}{number}-{turn}")
                self.ok += 1
            except (OSError, StreamError, http.client.HTTPException) as error:
                self.failed.append(f"{type(error).__name__}: {error}")

    def _stream(self, prompt: str) -> None:
        last = None
        for now in completion(self._url, prompt, self._tokens):
            if last is not None:
                self.gaps.append((now, now - last))
            last = now


def swap(url: str, to: Path | None, folder: Path) -> dict:
    """Do it; what was done."""
    if to is not None:
        body = json.dumps({"bundle": str(to), "allow_older": True}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
        with urllib.request.urlopen(urllib.request.Request(f"{url}/admin/bundle", body, headers)) as answer:
            return json.load(answer)
    command = [
        "nice", sys.executable, "-m", "llmc", "loop", url, "-o", str(folder), "--once", "--json", "--min-gain",
        "0",
    ]  # fmt: skip
    done = json.loads(subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True).stdout)
    if done["outcome"] != "swapped":
        raise SystemExit(f"the loop swapped nothing: {done}")
    return done


def one_round(load: Load, url: str, to: Path | None, steady_s: float, folder: Path, turn: int) -> dict:
    """Steady seconds, the `turn`th swap, and what was between tokens in both."""
    load.gaps.clear()
    time.sleep(steady_s)
    began = time.monotonic()
    done = swap(url, to, folder / "loop")
    while fetch_metric(url, "bundle_drain_seconds_count") < turn:
        if time.monotonic() > began + DRAIN_S:
            raise SystemExit(f"the old bundle is still used: {done}")
        time.sleep(0.1)
    closed, gaps = time.monotonic(), list(load.gaps)
    parts = {
        "steady": [gap for at, gap in gaps if at < began], "window": [gap for at, gap in gaps if began <= at <= closed]
    }  # fmt: skip
    if not all(parts.values()):
        raise SystemExit(f"no stream ran on both sides of the swap: {done}; {load.failed[:1]}")
    found: dict[str, Any] = {
        f"{name}_{part}_ms": 1e3 * float(np.percentile(seconds, q))
        for name, seconds in parts.items()
        for part, q in (("p50", 50), ("p99", 99), ("max", 100))
    }
    found |= {"swap": done, "window_s": closed - began, "p99_ratio": found["window_p99_ms"] / found["steady_p99_ms"]}
    print(
        f"steady p99 {found['steady_p99_ms']:.0f} ms, window p99 {found['window_p99_ms']:.0f} ms "
        f"({found['p99_ratio']:.2f} x), window {found['window_s']:.1f} s", flush=True,
    )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--to", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steady", type=float, default=30.0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("-o", "--output", type=Path)
    requested = parser.parse_args()
    os.environ["LLMC_ADMIN_TOKEN"] = TOKEN
    turns = (
        [None]
        if requested.to is None
        else [(requested.to, requested.bundle)[n % 2].resolve() for n in range(requested.rounds)]
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        server = llmc_server(str(requested.bundle), requested.threads, folder / "server.log")
        load = Load(server.url, requested.clients, requested.tokens)
        try:
            rounds = [one_round(load, server.url, to, requested.steady, folder, n) for n, to in enumerate(turns, 1)]
        finally:
            load.end()
            server.close()
    found = {
        "bundle": requested.bundle.name, "clients": requested.clients, "ok": load.ok, "failed": len(load.failed),
        "errors": sorted(set(load.failed))[:5], "p99_ratio": statistics.median(r["p99_ratio"] for r in rounds),
        "rounds": rounds,
    }  # fmt: skip
    print(f"{load.ok} requests, {len(load.failed)} failed; p99 {found['p99_ratio']:.2f} x steady")
    if requested.output:
        requested.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
