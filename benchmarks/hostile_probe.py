"""What others notice meanwhile: /health asked again and again, and streams read, by a process of its own, so that
preparing an attack holds up no clock."""

from __future__ import annotations

import asyncio
import json
from multiprocessing.connection import Connection
from time import perf_counter

EVERY_S = 0.02
TIMEOUT_S = 120.0


class Probe:
    """Collects seconds of /health and gaps of `streams` streams of `tokens` tokens until it is asked for them."""

    def __init__(self, host: str, port: int, streams: int, tokens: int) -> None:
        self.host, self.port = host, port
        self.streams, self.tokens = streams, tokens
        self.health: list[float] = []
        self.gaps: list[float] = []
        self.faults: list[str] = []

    async def watch_health(self) -> None:
        while True:
            began = perf_counter()
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    reader, writer = await asyncio.open_connection(self.host, self.port)
                    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                    said = await reader.read()
                    writer.close()
                if not said.startswith(b"HTTP/1.1 200"):
                    self.faults.append(f"health: {said[:60]!r}")
            except (OSError, TimeoutError) as e:
                self.faults.append(f"health: {type(e).__name__}")
            self.health.append(perf_counter() - began)
            await asyncio.sleep(EVERY_S)

    async def read_streams(self) -> None:
        body = json.dumps(
            {"prompt": "Once", "max_tokens": self.tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        ).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        while True:
            try:
                reader, writer = await asyncio.open_connection(self.host, self.port)
                writer.write(head.encode() + body)
                line = await reader.readline()
                if b" 503 " in line or b" 429 " in line:  # a bounded queue: tried again, as it asks for
                    writer.close()
                    await asyncio.sleep(0.2)
                    continue
                if b" 200 " not in line:
                    self.faults.append(f"stream: {line[:60]!r}")
                last = None
                while line:
                    line = await reader.readline()
                    if line.startswith(b"data: "):
                        now = perf_counter()
                        if last is not None:
                            self.gaps.append(now - last)
                        last = now
                writer.close()
            except OSError as e:
                self.faults.append(f"stream: {type(e).__name__}")
                await asyncio.sleep(0.2)

    async def run(self, pipe: Connection) -> None:
        tasks = [asyncio.create_task(self.watch_health())]
        tasks += [asyncio.create_task(self.read_streams()) for _ in range(self.streams)]
        while await asyncio.to_thread(pipe.recv):
            pipe.send((self.health, self.gaps, self.faults))
            self.health, self.gaps, self.faults = [], [], []
        for task in tasks:
            task.cancel()


def main(host: str, port: int, streams: int, tokens: int, pipe: Connection) -> None:
    asyncio.run(Probe(host, port, streams, tokens).run(pipe))
