"""A server under hours of mixed use: random requests, clients that leave, malformed bodies. Does it grow, or leak?

    python benchmarks/soak.py BUNDLE --minutes 60 [--json] [-o result.json]

First the cache is filled, which takes its memory as tokens come. Every `--every` seconds the server's memory (RSS and
PSS of it and its children) and the gauges of /metrics are sampled. Growth is the median of the last tenth of the
samples over the median of the first tenth after `--warmup-minutes`. At the end everything stops, and the gauges are
read again once the server is idle. Nothing is asserted here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median
from time import perf_counter

import psutil
from serving_server import ServerProcess, llmc_server

from llmc.bench.loadtest.client import Caller
from llmc.bench.loadtest.http import Site
from llmc.bench.loadtest.outcome import Outcome
from llmc.bench.loadtest.prompts import Prompts
from llmc.bench.loadtest.run import find_model

MALFORMED = (
    b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": 1e400}', b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "temperature": "hot"}', b'{"prompt": ' + b"[" * 5000, b'{"prompt": "\\ud800", "n": 99999999}',
    b'{"prompt": [0, 99999999999], "max_tokens": 2}', b'{"prompt": "a", "stop": {}}',
)  # fmt: skip
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
IDLE_S = 60.0


async def request(caller: Caller, prompts: Prompts, draw: random.Random, longest: int) -> str:
    """A request of random lengths, left before its end one time in five."""
    prompt = draw.randint(1, max(1, longest // 2))
    output = draw.randint(1, max(1, longest // 4))
    outcome = Outcome(0, 0.0, prompt, output)
    call = caller.call(outcome, prompts.make(draw.getrandbits(40), prompt), perf_counter())
    if draw.random() < 0.2:
        try:
            await asyncio.wait_for(call, draw.uniform(0.001, 2.0))
        except TimeoutError:
            return "left"
    else:
        await call
    return "ok" if outcome.failure is None else outcome.failure.kind


async def fill(caller: Caller, longest: int) -> None:
    """The longest requests, more at once than there are slots: the cache takes its memory as tokens come."""
    prompts = Prompts(seed=-1)
    for turn in range(4):
        ones = [Outcome(0, 0.0, max(1, longest // 2), max(1, longest // 4)) for _ in range(24)]
        calls = (
            caller.call(o, prompts.make(1000 * turn + i, o.asked_prompt), perf_counter()) for i, o in enumerate(ones)
        )
        await asyncio.gather(*calls)


async def malformed(site: Site, draw: random.Random) -> str:
    """A body that is none, whole or cut off; the answer's status, or what became of the connection."""
    body = draw.choice(MALFORMED)
    path = draw.choice(["/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/none"])
    claimed = len(body) + (1000 if draw.random() < 0.1 else 0)
    reader, writer = await asyncio.open_connection(site.host, site.port)
    try:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {claimed}\r\n\r\n"
        writer.write(head.encode() + body)
        if claimed > len(body):
            return "malformed: cut off"
        line = await asyncio.wait_for(reader.readline(), 30)
        return f"malformed: {line.split()[1].decode()}" if line else "malformed: closed"
    finally:
        writer.close()


async def client(caller: Caller, seed: int, until: float, longest: int, counts: Counter[str]) -> None:
    draw, prompts = random.Random(seed), Prompts(seed=seed)
    while time.monotonic() < until:
        try:
            if draw.random() < 0.1:
                what = await malformed(caller.site, draw)
            else:
                what = await request(caller, prompts, draw, longest)
        except (OSError, TimeoutError) as error:
            what = type(error).__name__
        counts[what] += 1
        if what.startswith(("http 503", "no connection", "Connection")):
            await asyncio.sleep(0.2)


def memory(process: psutil.Process) -> dict[str, float]:
    """MiB of the process and its children."""
    found = {"rss": 0, "pss": 0}
    for one in [process, *process.children(recursive=True)]:
        info = one.memory_full_info()
        found["rss"] += info.rss
        found["pss"] += getattr(info, "pss", info.rss)
    return {name: value / 2**20 for name, value in found.items()}


async def gauges(caller: Caller) -> dict[str, float]:
    reader, writer = await asyncio.open_connection(caller.site.host, caller.site.port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    found = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        short = name.partition("{")[0].removeprefix("llmc:")
        if short in GAUGES:
            found[short] = float(value)
    return found


async def soak(server: ServerProcess, args: argparse.Namespace) -> dict:
    caller = await find_model(Caller(Site.parse(server.url), "", timeout_s=300))
    process = psutil.Process(server.process.pid)
    await fill(caller, args.longest)
    began = time.monotonic()
    until = began + 60 * args.minutes
    counts: Counter[str] = Counter()
    samples: list[dict[str, float]] = []
    clients = [
        asyncio.create_task(client(caller, args.seed + i, until, args.longest, counts)) for i in range(args.clients)
    ]
    while time.monotonic() < until:
        await asyncio.sleep(min(args.every, max(0.0, until - time.monotonic())))
        at = time.monotonic() - began
        samples.append({"at_s": at, **memory(process), **await gauges(caller)})
        if not args.json:
            last = samples[-1]
            print(f"{at:7.0f} s  {last['pss']:8.1f} MiB  {sum(counts.values())} requests", file=sys.stderr, flush=True)
    await asyncio.gather(*clients)
    idle = time.monotonic() + IDLE_S
    end = await gauges(caller)
    while any(end.get(name, 0) for name in GAUGES[:2]) and time.monotonic() < idle:
        await asyncio.sleep(0.2)
        end = await gauges(caller)
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
        found = asyncio.run(soak(server, args))
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
