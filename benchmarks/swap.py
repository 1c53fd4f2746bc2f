"""A re-plan and swap under load: failed requests, and the time between tokens in the swap's window against steady.

    python benchmarks/swap.py BUNDLE [--to OTHER] [--clients 4] [--steady 30] [-o result.json]

Clients stream completions one after the other. After `--steady` seconds OTHER is swapped in; without it `llmc loop`
plans for the traffic so far, compiles and swaps, whatever it gains. The window is from there until the old bundle is
closed. Goals: no request fails, and p99 between tokens in the window is at most twice that of the steady seconds.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from serving_server import fetch_metric, llmc_server

from llmc.loop.client import Client

TOKEN = "benchmark"
PROMPT = "In the year of the great flood the people of the valley moved to the hills. Number "


class Load:
    """Streams until `over`. `gaps`: (when it ended, seconds) between two tokens of a stream; `failed`: why."""

    def __init__(self, url: str, clients: int, tokens: int) -> None:
        self.over, self.gaps, self.failed, self.ok = threading.Event(), [], [], 0
        self._netloc, self._tokens = urlsplit(url).netloc, tokens
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
            except (OSError, ValueError, http.client.HTTPException) as error:
                self.failed.append(f"{type(error).__name__}: {error}")

    def _stream(self, prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": self._tokens, "stream": True, "ignore_eos": True, "temperature": 0}
        connection = http.client.HTTPConnection(self._netloc, timeout=300)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise ValueError(f"{answer.status} {answer.read(300)!r}")
        last, ended = None, False
        for line in answer:
            ended = ended or line.startswith(b"data: [DONE]")
            if line.startswith(b'data: {"error"'):
                raise ValueError(line.decode())
            if line.startswith(b"data: {"):
                now = time.monotonic()
                if last is not None:
                    self.gaps.append((now, now - last))
                last = now
        connection.close()
        if not ended:
            raise ValueError("the stream broke off")


def swap(client: Client, to: str | None, folder: Path) -> str:
    """Do it; what was done."""
    if to is not None:
        return json.dumps(client.swap(Path(to).resolve()))
    command = [
        sys.executable, "-m", "llmc", "loop", client.url, "-o", str(folder), "--once", "--json", "--min-gain", "0",
    ]  # fmt: skip
    return subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--to")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steady", type=float, default=30.0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    os.environ["LLMC_ADMIN_TOKEN"] = TOKEN
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        server = llmc_server(asked.bundle, asked.threads, folder / "server.log")
        try:
            load = Load(server.url, asked.clients, asked.tokens)
            time.sleep(asked.steady)
            began = time.monotonic()
            done = swap(Client(server.url, TOKEN), asked.to, folder / "loop")
            while fetch_metric(server.url, "bundle_drain_seconds_count") < 1 and time.monotonic() < began + 600:
                time.sleep(0.1)
            closed = time.monotonic()
            load.end()
        finally:
            server.close()
    steady = [gap for at, gap in load.gaps if at < began]
    window = [gap for at, gap in load.gaps if began <= at <= closed]
    if not (steady and window):
        raise SystemExit(f"no stream ran on both sides of the swap: {done}; {load.failed[:1]}")
    found = {
        "bundle": Path(asked.bundle).name, "clients": asked.clients, "swap": json.loads(done), "ok": load.ok,
        "failed": len(load.failed), "errors": sorted(set(load.failed))[:5], "window_s": closed - began,
        **{
            f"{name}_{part}_ms": 1e3 * float(np.percentile(gaps, q))
            for name, gaps in (("steady", steady), ("window", window))
            for part, q in (("p50", 50), ("p99", 99), ("max", 100))
        },
    }  # fmt: skip
    found["p99_ratio"] = found["window_p99_ms"] / found["steady_p99_ms"]
    print(json.dumps(found, indent=1))
    if asked.output:
        asked.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
