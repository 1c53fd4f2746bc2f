"""Servers as processes of the benchmarks: started, waited for, and ended."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

PATIENCE_S = 180.0
"""Without a word of progress: a server that compiles first, or shares its cores, takes longer in all."""


class ServerProcess:
    """A server on a port of its own; `ready` is the path that answers 200 once it takes requests."""

    def __init__(self, name: str, command: list[str], port: int, ready: str, log: Path) -> None:
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self._log = log.open("w")
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        deadline, said = time.monotonic() + PATIENCE_S, ""
        while (says := self._says(ready)) is not None:
            if says != said:
                deadline, said = time.monotonic() + PATIENCE_S, says
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise SystemExit(f"{name} did not come up ({said or 'no answer'}): {log.read_text()[-1000:]}")
            time.sleep(0.1)

    def _says(self, path: str) -> str | None:
        """What it answers while it is not ready; None once it is."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return None if answer.status == 200 else str(answer.status)
        except urllib.error.HTTPError as error:
            return error.read().decode(errors="replace")
        except OSError:
            return ""

    def close(self) -> int:
        """SIGTERM, then a minute; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self._log.close()
        return self.process.wait()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def llmc_server(bundle: str, threads: int, log: Path, *more: str) -> ServerProcess:
    port = free_port()
    command = [
        sys.executable, "-m", "llmc", "serve", bundle, "--port", str(port), "--threads", str(threads), "--json", *more,
    ]  # fmt: skip
    return ServerProcess("llmc", command, port, "/ready", log)


def llama_server(python: str, gguf: str, threads: int, log: Path, context: int = 2048) -> ServerProcess:
    """llama-cpp-python's server, which answers one request at a time; by default a new one would end the last."""
    port = free_port()
    command = [
        python, "-m", "llama_cpp.server", "--model", gguf, "--host", "127.0.0.1", "--port", str(port), "--n_ctx",
        str(context), "--n_threads", str(threads), "--n_threads_batch", str(threads), "--interrupt_requests", "False",
        "--verbose", "False",
    ]  # fmt: skip
    return ServerProcess("llama-cpp-python", command, port, "/v1/models", log)


def fetch_metric(url: str, name: str) -> float:
    """A sample of llmc's /metrics, without labels but the model's."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith(f"llmc:{name}{{")).rpartition(" ")[2])
