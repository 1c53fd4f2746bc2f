"""A server under hours of mixed use: random requests, clients that leave, malformed bodies. Does it grow, or leak?

    python benchmarks/soak.py BUNDLE --minutes 60 [--json] [-o result.json]

First the cache is filled, which takes its memory as tokens come. Every `--every` seconds the server's memory (RSS and
PSS of it and its children) and the gauges of /metrics are sampled. Growth is the median of the last tenth of the
samples over the median of the first tenth after `--warmup-minutes`. At the end everything stops, and the gauges are
read again once the server is idle. Nothing is asserted here.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import socket
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import psutil
from serving_server import ServerProcess, fetch_metric, llmc_server
from streaming import StreamError, completion, prompt_ids

MALFORMED = (
    b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": 1e400}', b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "temperature": "hot"}', b'{"prompt": ' + b"[" * 5000, b'{"prompt": "\\ud800", "n": 99999999}',
    b'{"prompt": [0, 99999999999], "max_tokens": 2}', b'{"prompt": "a", "stop": {}}',
)  # fmt: skip
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
IDLE_S = 60.0


def request(url: str, draw: random.Random, longest: int) -> str:
    """A request of random lengths, left before its end one time in five."""
    prompt = prompt_ids(draw, draw.randint(1, max(1, longest // 2)))
    tokens = draw.randint(1, max(1, longest // 4))
    left_s = draw.uniform(0.001, 2.0) if draw.random() < 0.2 else None
    leaves = time.monotonic() + (left_s or 300.0)
    try:
        for now in completion(url, prompt, tokens, left_s or 300.0):
            if now > leaves:
                return "left" if left_s else "timeout"
    except TimeoutError:
        return "left" if left_s else "timeout"
    except StreamError as error:
        return error.kind
    return "ok"


def fill(url: str, longest: int) -> None:
    """The longest requests, more at once than there are slots: the cache takes its memory as tokens come."""

    def one(number: int) -> None:
        with contextlib.suppress(StreamError):
            ids = prompt_ids(random.Random(number), max(1, longest // 2))
            for _ in completion(url, ids, max(1, longest // 4)):
                pass

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(one, range(96)))


def malformed(url: str, draw: random.Random) -> str:
    """A body that is none, whole or cut off; the answer's status, or what became of the connection."""
    body = draw.choice(MALFORMED)
    path = draw.choice(["/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/none"])
    claimed = len(body) + (1000 if draw.random() < 0.1 else 0)
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {claimed}\r\n\r\n"
        connection.sendall(head.encode() + body)
        if claimed > len(body):
            return "malformed: cut off"
        line = connection.makefile("rb").readline()
        return f"malformed: {line.split()[1].decode()}" if line else "malformed: closed"


def client(url: str, seed: int, until: float, longest: int) -> Counter[str]:
    """What became of each of a client's requests, one after the other."""
    draw, counts = random.Random(seed), Counter[str]()
    while time.monotonic() < until:
        try:
            what = malformed(url, draw) if draw.random() < 0.1 else request(url, draw, longest)
        except (OSError, http.client.HTTPException) as error:
            what = type(error).__name__
        counts[what] += 1
        if what.startswith(("http 503", "Connection")):
            time.sleep(0.2)
    return counts


def memory(process: psutil.Process) -> dict[str, float]:
    """MiB of the process and its children."""
    found = {"rss": 0, "pss": 0}
    for one in [process, *process.children(recursive=True)]:
        info = one.memory_full_info()
        found["rss"] += info.rss
        found["pss"] += getattr(info, "pss", info.rss)
    return {name: value / 2**20 for name, value in found.items()}


def gauges(url: str) -> dict[str, float]:
    return {name: fetch_metric(url, name) for name in GAUGES}


def soak(server: ServerProcess, args: argparse.Namespace) -> dict:
    url, process = server.url, psutil.Process(server.process.pid)
    fill(url, args.longest)
    began = time.monotonic()
    until = began + 60 * args.minutes
    samples: list[dict[str, float]] = []
    with ThreadPoolExecutor(args.clients) as pool:
        clients = [pool.submit(client, url, args.seed + i, until, args.longest) for i in range(args.clients)]
        while time.monotonic() < until:
            time.sleep(min(args.every, max(0.0, until - time.monotonic())))
            at = time.monotonic() - began
            samples.append({"at_s": at, **memory(process), **gauges(url)})
            if not args.json:
                print(f"{at:7.0f} s  {samples[-1]['pss']:8.1f} MiB", file=sys.stderr, flush=True)
        counts = sum((one.result() for one in clients), Counter[str]())
    idle = time.monotonic() + IDLE_S
    end = gauges(url)
    while any(end.get(name, 0) for name in GAUGES[:2]) and time.monotonic() < idle:
        time.sleep(0.2)
        end = gauges(url)
    return {"minutes": args.minutes, "outcomes": dict(counts.most_common()), "gauges_at_end": end,
            **growth(samples, 60 * args.warmup_minutes), "samples": samples}  # fmt: skip


def growth(samples: list[dict[str, float]], warmup_s: float) -> dict:
    """Percent by which memory grew after the warm-up."""
    kept = [s for s in samples if s["at_s"] >= warmup_s] or samples
    tenth = max(1, len(kept) // 10)
    found = {}
    for name in ("rss", "pss"):
        first, last = (median(s[name] for s in part) for part in (kept[:tenth], kept[-tenth:]))
        found[name] = {"first_mib": first, "last_mib": last, "growth_percent": 100 * (last / first - 1)}
    return {"memory": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--warmup-minutes", type=float, default=5)
    parser.add_argument("--every", type=float, default=5)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--longest", type=int, default=512, help="tokens of a request, about")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", default="/tmp/llmc-soak.log")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    server = llmc_server(args.bundle, args.threads, Path(args.log))
    try:
        found = soak(server, args)
        found["exit_code"] = server.close()
    finally:
        server.close()
    if args.output:
        Path(args.output).write_text(json.dumps(found, indent=1))
    if args.json:
        print(json.dumps(found))
        return
    print(f"{sum(found['outcomes'].values())} requests in {args.minutes:g} minutes")
    for what, count in found["outcomes"].items():
        print(f"  {what:28s} {count}")
    for name, m in found["memory"].items():
        print(f"{name.upper()}  {m['first_mib']:.1f} → {m['last_mib']:.1f} MiB, {m['growth_percent']:+.2f}%")
    print("idle:", ", ".join(f"{name} {value:g}" for name, value in found["gauges_at_end"].items()))
    print("exit code", found["exit_code"])


if __name__ == "__main__":
    main()
