"""`llmc serve --prefill`: prompts computed in a process of its own, and a server that is killed in mid-request."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.server.process import Process
from tests.tiers import full
from tests.toy import greedy

PROMPT = [5, 6, 7, 8]


@pytest.fixture
def prefill(bundle: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "llmc.cli.main", "prefill", str(bundle), "--listen", "127.0.0.1:0", "--json"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    yield process, json.loads(process.stdout.readline())["address"]
    process.kill()
    process.communicate()


def tokens(server: Process, prompt: list[int], count: int = 6) -> list[int]:
    status, answer = server.complete(prompt=prompt, max_tokens=count, return_token_ids=True)
    assert status == 200
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def handed_over(server: Process) -> float:
    with urlopen(f"http://127.0.0.1:{server.port}/metrics") as response:
        found = re.search(r"^llmc:kv_transfer_prompts_total\S* (\S+)$", response.read().decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


@full
def test_a_server_whose_prompts_come_over_tcp_outlives_the_other_side(
    prefill: tuple[subprocess.Popen[str], str], bundle: Path, tmp_path: Path
) -> None:
    process, address = prefill
    wanted = greedy(bundle.parent / "toy", [PROMPT], 6)[0]
    with Process(tmp_path / "cache", bundle, "--port", 0, "--prefill", address) as server:
        server.ready()
        assert tokens(server, PROMPT) == wanted
        assert handed_over(server) >= 1
        process.kill()
        process.wait()
        assert tokens(server, PROMPT) == wanted
        assert server.ask("GET", "/health")[0] == 200


def test_a_decoding_server_that_is_killed_in_mid_request_holds_up_no_other(
    prefill: tuple[subprocess.Popen[str], str], bundle: Path, tmp_path: Path
) -> None:
    process, address = prefill
    with (
        Process(tmp_path / "one", bundle, "--port", 0, "--prefill", address) as doomed,
        Process(tmp_path / "two", bundle, "--port", 0, "--prefill", address) as other,
    ):
        doomed.ready()
        other.ready()
        requested = [threading.Thread(target=_requested, args=(doomed,)) for _ in range(8)]
        for one in requested:
            one.start()
        os.kill(doomed.child.pid, signal.SIGKILL)
        for one in requested:
            one.join()
        assert tokens(other, PROMPT) == greedy(bundle.parent / "toy", [PROMPT], 6)[0]
        assert handed_over(other) >= 1
        assert process.poll() is None


def _requested(server: Process) -> None:
    try:
        server.complete(prompt=PROMPT, max_tokens=24)
    except (OSError, ValueError, HTTPException):
        return  # it was killed, which is the point
