"""Requests made to harm: does anybody else notice?

    python benchmarks/hostile.py BUNDLE [--json] [-o result.json] [--only NAME] [--memory-gib 6] [--settle 5]

Sends each attack of hostile_requests.py, and signals that ask for nothing, to a `llmc serve BUNDLE` of its own, on
loopback: once while nothing else runs (quiet), once beside streams. Told for each: the slowest /health, the longest gap
in a stream, statuses. A status is right that is a 2xx or a 4xx; a 503 with Retry-After is the bounded queue's, and told
apart. At the end: the server's memory against that before. Nothing is asserted; `failures` lists what missed its bound:
/health 0.1 s quiet and 0.5 s beside streams, gaps twice the longest of a steady time, memory 5%.

The server's memory is limited (RLIMIT_DATA of each of its processes, and a watch over all of them that ends it), an
attack's time (--limit), and connections (300).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import hostile_probe
import psutil
from hostile_requests import ATTACKS, Attack, complete

QUIET_S, BESIDE_S, GAPS, MEMORY = 0.1, 0.5, 2.0, 0.05
STREAMS, TOKENS = 2, 96
ATTACKER = "127.0.0.2"
"""Where attacks come from: another client than the one that watches."""
SLOW_S = 3.0
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


@dataclass
class Server:
    """`llmc serve` with a ceiling of memory."""

    process: subprocess.Popen[str]
    port: int
    ceiling: int
    over: bool = False

    @classmethod
    def start(cls, bundle: str, threads: int, gib: float, log: Path) -> Server:
        ceiling = int(gib * 2**30)

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_DATA, (ceiling, ceiling))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        command = [sys.executable, "-m", "llmc", "serve", bundle, "--port", "0", "--threads", str(threads), "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log.open("w"), text=True, preexec_fn=limit)  # noqa: PLW1509
        assert process.stdout is not None
        port = 0
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "listening":
                port = int(event["url"].rpartition(":")[2])
            if event["event"] == "ready":
                break
        else:
            raise SystemExit(f"the server did not come up; see {log}")
        server = cls(process, port, ceiling)
        threading.Thread(target=server._watch, daemon=True).start()
        return server

    def _watch(self) -> None:
        while self.process.poll() is None:
            if self.memory() > self.ceiling:
                self.over = True
                self.process.kill()
            time.sleep(0.2)

    def memory(self) -> int:
        """PSS in bytes of the process and its children."""
        total = 0
        try:
            process = psutil.Process(self.process.pid)
            for one in [process, *process.children(recursive=True)]:
                total += one.memory_full_info().pss
        except psutil.Error:
            pass
        return total

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@dataclass
class Seen:
    """What was noticed of one attack."""

    name: str
    seconds: float = 0.0
    health_s: float = 0.0
    gap_s: float = 0.0
    statuses: dict[str, int] = field(default_factory=dict)
    without_retry_after: int = 0
    faults: list[str] = field(default_factory=list)


class Watcher:
    """A probe in a process of its own."""

    def __init__(self, port: int, streams: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        arguments = ("127.0.0.1", port, streams, TOKENS, other)
        self._process = context.Process(target=hostile_probe.main, args=arguments, daemon=True)
        self._process.start()
        time.sleep(1.0)
        self.take()

    def take(self) -> tuple[list[float], list[float], list[str]]:
        """Seconds of /health, gaps, faults since the last time."""
        self._pipe.send(True)
        return self._pipe.recv()  # type: ignore[no-any-return]

    def close(self) -> None:
        self._pipe.send(False)
        self._process.join(10)


async def send(port: int, data: bytes, shape: str, limit_s: float) -> bytes:
    """What one connection was answered, at most the first and last of it."""
    said = b""
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(ATTACKER, 0))
            if shape == "slow":
                for byte in data[:-1][: int(SLOW_S / 0.1)]:
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0.1)
                if not data:
                    await asyncio.sleep(SLOW_S)
                writer.close()
                return b""
            writer.write(data)
            if shape == "leave":
                await writer.drain()
                await asyncio.sleep(0.05)
                writer.transport.abort()
                return b""
            if shape == "deaf":
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                await asyncio.sleep(SLOW_S)
                writer.transport.abort()
                return b""
            while part := await reader.read(1 << 16):
                said = (said + part)[: 1 << 16]
            writer.close()
    except TimeoutError:
        return said or b"HTTP/1.1 000 \r\n"
    except OSError:
        pass
    return said


def attack(server: Server, one: Attack, watcher: Watcher, limit_s: float, settle_s: float = 0.3) -> Seen:
    """Send it and see."""
    data = one.make()
    watcher.take()
    began = time.perf_counter()

    async def all_copies() -> list[bytes]:
        return await asyncio.gather(*(send(server.port, data, one.shape, limit_s) for _ in range(one.copies)))

    answers = asyncio.run(all_copies())
    seen = Seen(one.name, time.perf_counter() - began)
    time.sleep(settle_s)
    health, gaps, faults = watcher.take()
    seen.health_s, seen.gap_s = max(health, default=0.0), max(gaps, default=0.0)
    seen.faults = sorted(set(faults))
    statuses = Counter(status.decode() for answer in answers for status in _STATUS.findall(answer))
    closed = sum(not answer for answer in answers)
    seen.statuses = dict(sorted({**statuses, **({"closed": closed} if closed else {})}.items()))
    seen.without_retry_after = sum(b" 503 " in a[:20] and b"retry-after:" not in a.lower() for a in answers)
    return seen


def wrong(seen: Seen) -> list[str]:
    """Statuses that no request may have."""
    found = [s for s in seen.statuses if s.isdecimal() and s != "503" and not 200 <= int(s) < 500]
    return [*found, *(["503 without Retry-After"] if seen.without_retry_after else [])]


def rounds(server: Server, attacks: list[Attack], args: argparse.Namespace) -> dict[str, Any]:
    """Quiet, then beside streams."""
    found: dict[str, Any] = {}
    for phase, streams in (("quiet", 0), ("beside", STREAMS)):
        watcher = Watcher(server.port, streams)
        time.sleep(args.steady)
        health, gaps, _ = watcher.take()
        steady = {"health_s": max(health), "gap_s": max(gaps, default=0.0),
                  "gap_p99_s": quantiles(gaps, n=100)[98] if len(gaps) > 1 else 0.0}  # fmt: skip
        seen = []
        for one in attacks:
            seen.append(attack(server, one, watcher, args.limit))
            if not args.json:
                on_progress(phase, seen[-1])
            if server.process.poll() is not None:
                break
        watcher.close()
        found[phase] = {"steady": steady, "attacks": [asdict(s) for s in seen]}
        if server.process.poll() is not None:
            return found
    return found


def signals(server: Server) -> Seen:
    """Those that ask for nothing."""
    watcher, seen = Watcher(server.port, 0), Seen("SIGUSR1 and SIGUSR2")
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        server.process.send_signal(signum)
        time.sleep(0.3)
    health, _, faults = watcher.take()
    seen.health_s, seen.faults = max(health, default=0.0), sorted(set(faults))
    watcher.close()
    return seen


def failures(found: dict[str, Any]) -> list[str]:
    """What missed its bound."""
    missed = [] if found["alive"] else ["the server ended" + (": over its memory" if found["over_memory"] else "")]
    for phase, bound in (("quiet", QUIET_S), ("beside", BESIDE_S)):
        if phase not in found:
            continue
        steady = found[phase]["steady"]["gap_s"]
        for values in found[phase]["attacks"]:
            seen = Seen(**values)
            if seen.health_s > bound:
                missed.append(f"{phase}, {seen.name}: /health took {seen.health_s:.3f} s (bound {bound})")
            if steady and seen.gap_s > GAPS * steady:
                missed.append(f"{phase}, {seen.name}: a gap of {seen.gap_s:.3f} s (steady {steady:.3f} s)")
            missed += [f"{phase}, {seen.name}: {what}" for what in (*wrong(seen), *seen.faults)]
    if found["memory"]["growth"] > MEMORY:
        missed.append(f"memory grew by {found['memory']['growth']:.1%}")
    return missed


def on_progress(phase: str, seen: Seen) -> None:
    statuses = " ".join(f"{status}×{count}" for status, count in seen.statuses.items())
    line = f"{phase:7s} {seen.name:34s} {seen.seconds:7.2f} s  health {1e3 * seen.health_s:7.1f} ms"
    print(f"{line}  gap {1e3 * seen.gap_s:7.1f} ms  {statuses} {' '.join(wrong(seen) + seen.faults)}", flush=True)


def used(server: Server, settle_s: float) -> int:
    """Memory after ordinary requests, one of them with a schema, once all is quiet."""

    async def some() -> None:
        await send(server.port, complete(guided_json={"type": "object"}), "whole", 60)
        for _ in range(8):
            await asyncio.gather(*(send(server.port, complete(max_tokens=TOKENS), "whole", 60) for _ in range(8)))

    asyncio.run(some())
    time.sleep(settle_s)
    return server.memory()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--only", help="attacks whose name holds this")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory-gib", type=float, default=6.0)
    parser.add_argument("--limit", type=float, default=30.0, help="seconds of one attack")
    parser.add_argument("--steady", type=float, default=5.0, help="seconds watched before the attacks")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds of quiet before memory is read")
    parser.add_argument("--log", default="/tmp/llmc-hostile.log")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    attacks = [one for one in ATTACKS if args.only is None or args.only in one.name]
    server = Server.start(args.bundle, args.threads, args.memory_gib, Path(args.log))
    found: dict[str, Any] = {}
    try:
        before = used(server, args.settle)
        found = rounds(server, attacks, args)
        if server.process.poll() is None:
            found["signals"] = asdict(signals(server))
        after = used(server, args.settle) if server.process.poll() is None else 0
        found["memory"] = {"before_mib": before / 2**20, "after_mib": after / 2**20, "growth": after / before - 1}
        found["alive"], found["over_memory"] = server.process.poll() is None, server.over
    finally:
        found["exit_code"] = server.stop()
    found["failures"] = failures(found)
    if args.output:
        Path(args.output).write_text(json.dumps(found, indent=1))
    if args.json:
        print(json.dumps(found))
        return
    memory = found["memory"]
    print(f"memory {memory['before_mib']:.1f} → {memory['after_mib']:.1f} MiB, {memory['growth']:+.1%}")
    for phase in ("quiet", "beside"):
        if phase in found:
            worst = {key: max(s[key] for s in found[phase]["attacks"]) for key in ("health_s", "gap_s")}
            steady = found[phase]["steady"]
            print(f"{phase}: slowest /health {worst['health_s']:.3f} s (steady {steady['health_s']:.3f}), longest gap "
                  f"{worst['gap_s']:.3f} s (steady {steady['gap_s']:.3f})")  # fmt: skip
    print(f"{len(attacks)} attacks, twice; {len(found['failures'])} missed a bound; exit code {found['exit_code']}")
    for line in found["failures"]:
        print(f"  {line}")


if __name__ == "__main__":
    main()
