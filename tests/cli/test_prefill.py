"""`llmc prefill`: prompts of other processes, and what becomes of them when it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc.errors import DeviceError
from llmc.runtime.disaggregated.opening import ChildPrefiller
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.llm import BundleLLM
from tests.cli.helpers import Llmc
from tests.tiers import default_cases, full
from tests.timing import PATIENCE_S, until
from tests.toy import greedy

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def start(bundle: Path, where: str) -> tuple[subprocess.Popen[str], str]:
    """A process that listens, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "llmc.cli.main", "prefill", str(bundle), "--listen", where, "--json"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    reported = json.loads(process.stdout.readline())
    assert reported["event"] == "listening" and reported["facts"]["device"] == "fake"
    return process, reported["address"]


@pytest.fixture
def prefill(bundle: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process, address = start(bundle, "127.0.0.1:0")
    yield process, address
    process.kill()
    process.communicate()


def test_prompts_come_over_tcp_and_it_ends_with_how_many(
    prefill: tuple[subprocess.Popen[str], str], llmc: Llmc, toy: Path
) -> None:
    process, address = prefill
    ran = llmc("generate", "bundle", "--prompt", "a river", "--ignore-eos", "--max-tokens", 6, "--prefill", address,
               "--json")  # fmt: skip
    said = json.loads(ran.out)
    assert [said["token_ids"]] == greedy(toy, [said["prompt_token_ids"]], 6)
    assert said["timings"]["kv_transfer"]["bytes"] > 0
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, json.loads(out)) == (0, {"event": "stopped", "served": 1})


def test_a_server_that_is_killed_in_mid_request_loses_no_request(
    prefill: tuple[subprocess.Popen[str], str], bundle: Path, toy: Path
) -> None:
    """Some prompts have come, some are on their way, some wait: all are answered, before and after it is back."""
    process, address = prefill
    prompts = [[index + 1, 2, 3, 4, 5] for index in range(12)]
    requested = [{"prompt_token_ids": prompt} for prompt in prompts]
    with BundleLLM(bundle, prefill=address) as llm:
        updates = llm.stream(requested, GREEDY)
        next(updates)
        process.kill()
        process.wait()
        outputs = {index: output for index, _, output in updates}
        assert [outputs[i].outputs[0].token_ids for i in range(12)] == greedy(toy, prompts, 6)
        again, _ = start(bundle, address.removeprefix("tcp://"))
        try:
            after = llm.generate(requested[:2], GREEDY)
        finally:
            again.kill()
            again.communicate()
    assert [output.outputs[0].token_ids for output in after] == greedy(toy, prompts[:2], 6)


def test_a_door_to_other_hosts_needs_a_key(llmc: Llmc, bundle: Path) -> None:
    ran = llmc("prefill", bundle, "--listen", "0.0.0.0:0")
    assert ran.code == 2 and "no key is set: set LLMC_PREFILL_KEY" in ran.err


@default_cases(2)
@pytest.mark.parametrize("where", ["unix:", "nowhere", "127.0.0.1:x", "tcp://127.0.0.1:99999"])
def test_what_is_no_address_is_refused(llmc: Llmc, bundle: Path, where: str) -> None:
    ran = llmc("prefill", bundle, "--listen", where)
    assert ran.code == 2 and len(ran.err.splitlines()) == 1


def test_nobody_at_the_address_is_a_missing_device(llmc: Llmc, bundle: Path) -> None:
    ran = llmc("generate", bundle, "--prompt", "x", "--prefill", "unix:/nowhere")
    assert ran.code == 3 and "llmc prefill BUNDLE --listen unix:/nowhere" in ran.err


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no signals: Windows")
def test_it_says_where_it_listens(bundle: Path, tmp_path: Path) -> None:
    process, address = start(bundle, f"unix:{tmp_path / 's'}")
    assert address == f"unix:{tmp_path / 's'}"
    process.terminate()
    process.communicate(timeout=PATIENCE_S)
    assert not (tmp_path / "s").exists()


@full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no Unix sockets: Windows")
def test_a_process_of_its_own_is_started_again_and_ends_with_this_one(bundle: Path, toy: Path) -> None:
    requested = [{"prompt_token_ids": [index + 1, 2, 3]} for index in range(6)]
    wanted = greedy(toy, [[index + 1, 2, 3] for index in range(6)], 6)
    with BundleLLM(bundle, prefill=f"process:{bundle}") as llm:
        child = llm.core.prefiller
        assert isinstance(child, ChildPrefiller)
        first = child.process
        assert [o.outputs[0].token_ids for o in llm.generate(requested, GREEDY)] == wanted
        os.kill(first, signal.SIGKILL)
        assert [o.outputs[0].token_ids for o in llm.generate(requested, GREEDY)] == wanted
        until(lambda: child.connections == 2)
        assert [o.outputs[0].token_ids for o in llm.generate(requested, GREEDY)] == wanted
        second = child.process
        assert second != first
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no Unix sockets: Windows")
def test_a_bundle_that_cannot_be_opened_there_is_an_error_here(bundle: Path) -> None:
    with pytest.raises(DeviceError, match="the prefill process did not start and ended with code 5"):
        BundleLLM(bundle, prefill="process:nowhere")
