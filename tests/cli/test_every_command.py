"""Every command runs to its end on the demo model: plan, compile, verify, answer, serve, share, deploy.

A case is a command and the lines that run it, in a folder of its own; the last line prints what the case names. Words
in capitals are files that `built` writes.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import typer
from typer.main import get_group

from llmc.cli.main import main
from llmc.cli.options import add_named
from llmc.cli.root import COMMANDS
from llmc.compiler.checkpoint import demo_path
from llmc.testing.toy import write_toy_encoder
from tests.cli.conftest import surround
from tests.cli.helpers import Llmc
from tests.server.process import Process
from tests.test_real_weights import flip

pytestmark = pytest.mark.real_weights

DEMO = "smollm2-demo"
TRAFFIC = Path(__file__).parents[1] / "data" / "azure_conv_sample.csv"
PLAN = f"plan {DEMO} --max-model-len 64 -o plan.json"
VLLM = "--server vllm --max-model-len 8192 --max-num-seqs 8"
ENCODER = "--device fake --max-num-seqs 2 -o encoder.llmc"
FLEET = "models: [{bundle: bundle, replicas: 3}]"
RUNS = {
    "plan make": ([PLAN], "prompt"),
    "plan show": ([PLAN, "plan show plan.json"], "decode"),
    "plan evaluate": ([PLAN, "plan evaluate plan.json --traffic SHORT"], "40 requests"),
    "plan disaggregated": (
        [
            "bench BUNDLE --seconds 0.01 -o times.json",
            "plan disaggregated --prefill-bench times.json --decode-bench times.json --gb-per-s 3 "
            "--kv-bytes-per-token 45KiB --prompt-len 32 --output-len 16",
        ],
        "requests/s",
    ),
    "plan fleet": (["plan fleet FLEET"], "host memory"),
    "plan export": ([PLAN, "plan export plan.json --server vllm"], "cudagraph_capture_sizes"),
    "plan tune": ([f"plan tune {VLLM} --traffic TRAFFIC -o tuned"], "the server's own"),
    "plan check": (
        [f"plan tune {VLLM} --traffic TRAFFIC -o tuned", f"plan check tuned {VLLM} --traffic TRAFFIC"], "padding",
    ),
    "plan import": (
        [f"plan tune {VLLM} --traffic TRAFFIC -o tuned", f"plan import tuned {VLLM} -o running.json"], "running.json",
    ),
    "plan capture": ([PLAN, f"plan capture plan.json --device-memory 8GiB --model {DEMO}"], "KV cache"),
    "compile": ([f"compile {DEMO} --device onnxruntime --max-model-len 64 --max-num-seqs 1 --dry-run"], "to build"),
    "run": (["run BUNDLE 'The capital of France is' --max-tokens 4"], ""),
    "chat": (["chat BUNDLE --max-tokens 4"], ""),
    "verify": (["verify BUNDLE"], "files intact; against transformers"),
    "generate": (["generate BUNDLE --prompt 'The capital of France is' --max-tokens 4"], "Paris"),
    "embed": (["compile ENCODER/embed " + ENCODER, "embed encoder.llmc --text Paris"], "8 numbers"),
    "score": (["compile ENCODER/score " + ENCODER, "score encoder.llmc --query a -d b -d c"], "b"),
    "warmup": (["warmup BUNDLE --certify certificate.json --requests 20"], "compilations"),
    "bench buckets": (["bench BUNDLE --seconds 0.01"], "prompt"),
    "bench cpu": (["bench cpu --help"], "Usage"),
    "devices": (["devices"], "onnxruntime"),
    "deploy": (["deploy systemd --bundle BUNDLE --print"], "ExecStart"),
    "report": (["report BUNDLE"], "smollm2-demo for onnxruntime"),
    "loop": (["loop --bundle BUNDLE --traffic SHORT --once --dry-run"], "requests"),
    "completion": (["completion bash"], "complete"),
    "traffic show": (["traffic show TRAFFIC"], "1,500 requests"),
    "traffic merge": (["traffic merge TRAFFIC TRAFFIC -o two.jsonl", "traffic show two.jsonl"], "3,000 requests"),
    "traffic sample": (["traffic sample TRAFFIC -n 100 -o part.jsonl", "traffic show part.jsonl"], "100 requests"),
    "traffic anonymise": (["traffic anonymise TRAFFIC -o a.jsonl", "traffic show a.jsonl"], "1,500 requests"),
    "cache ls": (["cache ls"], "executable"),
    "cache show": (["cache show BUNDLE"], "bundle for onnxruntime"),
    "cache verify": (["cache verify BUNDLE"], "0 damaged"),
    "cache pin": (["cache pin BUNDLE --cache-dir own", "cache pin --cache-dir own"], "bundle"),
    "cache unpin": (["cache pin BUNDLE --cache-dir own", "cache unpin BUNDLE --cache-dir own"], "0 pinned"),
    "cache gc": (
        ["cache pin BUNDLE --cache-dir own", "cache unpin BUNDLE --cache-dir own", "cache gc --cache-dir own"], "",
    ),
    "cache rm": (["cache pin BUNDLE --cache-dir own", "cache unpin BUNDLE --cache-dir own",
                  "cache rm BUNDLE --cache-dir own"], "removed 1 entry"),
    "cache explain": (["cache explain BUNDLE"], ""),
    "cache keygen": (["cache keygen mine"], "mine.pub"),
    "cache trust": (["cache keygen mine", "cache trust mine.pub --name mine", "cache trust --list"], "mine"),
    "cache sign": (["cache keygen mine", "cache sign BUNDLE --key mine", "cache verify BUNDLE"], "signed by"),
    "cache push": (["cache push shared BUNDLE"], "shared"),
    "cache pull": (
        [
            "cache keygen mine", "cache trust mine.pub --name mine", "cache push shared BUNDLE --key mine",
            "cache pull shared --cache-dir own",
        ],
        "pulled 1 entry",
    ),
    "cache export": (["cache export bundle.tar BUNDLE"], "bundle.tar"),
    "cache import": (
        [
            "cache keygen mine", "cache trust mine.pub --name mine", "cache sign BUNDLE --key mine",
            "cache export bundle.tar BUNDLE", "cache import bundle.tar --cache-dir own -o other",
            "generate other --prompt 'The capital of France is' --max-tokens 4",
        ],
        "Paris",
    ),
}  # fmt: skip
REQUESTED = ("--device", "onnxruntime", "--max-model-len", "64", "--max-num-seqs", "2")
"""How the bundle is compiled."""
ELSEWHERE = {
    "serve": "test_the_server",
    "prefill": "tests/cli/test_prefill.py",
    "tune": "tests/cli/test_tune.py: it needs a GPU",
    "cache pack": "tests/cli/test_cache_third_party.py",
    "cache unpack": "tests/cli/test_cache_third_party.py",
}
"""Commands that other tests run."""


def commands() -> set[str]:
    """Every command line's first words: a command, and its verb where it has verbs."""
    found = set()
    for name, (location, _) in COMMANDS.items():
        own = typer.Typer()
        add_named(own, name, location)
        command = get_group(own).commands[name]
        found |= {f"{name} {verb}" for verb in getattr(command, "commands", ())} or {name}
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a bundle of the demo model, the store of its compile, traffic, a fleet, and two encoders."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        surround(patch, folder, folder / "cache")
        assert main(["compile", DEMO, *REQUESTED, "-q", "-o", "bundle"]) == 0
    requests = "".join(f"2026-01-01 00:00:{second:02},{8 + second},{4 + second % 8}\n" for second in range(40))
    (folder / "short.csv").write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{requests}")
    (folder / "fleet.yaml").write_text(FLEET)
    for task in ("embed", "score"):
        write_toy_encoder(folder / "encoders" / task, task)
    return folder


def test_every_command_is_run() -> None:
    assert commands() == RUNS.keys() | ELSEWHERE.keys()


@pytest.mark.parametrize("command", RUNS)
def test_it_runs_to_its_end(command: str, built: Path, llmc: Llmc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(built / "cache"))
    monkeypatch.setenv("LLMC_TRUSTED_KEYS", "trusted")
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    lines, printed = RUNS[command]
    paths = {
        "BUNDLE": built / "bundle", "ENCODER": built / "encoders", "FLEET": built / "fleet.yaml",
        "SHORT": built / "short.csv", "TRAFFIC": TRAFFIC,
    }  # fmt: skip
    for line in lines:
        ran = llmc(*(re.sub("|".join(paths), lambda name: str(paths[name[0]]), word) for word in shlex.split(line)))
        assert ran.code == 0, (line, ran)
    assert printed in ran.out + ran.err, ran


def test_the_server(built: Path) -> None:
    with Process(built / "cache", built / "bundle", "--port", 0) as server:
        server.ready()
        status, answer = server.complete(prompt="The capital of France is", max_tokens=4, temperature=0)
        assert status == 200 and "Paris" in answer["choices"][0]["text"]
        server.signal()
        assert server.ended()[0] == 0


@pytest.mark.parametrize("at", [0, 5_000, 50_000_000])
def test_a_changed_bit_of_the_model_is_an_error_or_a_model_that_is_not_in_the_store(
    built: Path, llmc: Llmc, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at: int
) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(built / "cache"))
    copy = Path(shutil.copyfile(demo_path(), tmp_path / "copy.gguf"))
    assert "0 executables to build, 1 cached" in llmc("compile", copy, *REQUESTED, "--dry-run").out
    before = copy.stat()
    flip(copy, at)
    os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
    ran = llmc("compile", copy, *REQUESTED, "--dry-run")
    if at < 50_000_000:
        assert str(copy) in ran.failed(1)
    else:
        assert "1 executable to build, 0 cached" in ran.out
