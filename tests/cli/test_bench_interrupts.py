"""An interrupted bench keeps, shows and writes what it measured, and says what it did not: each as a whole command."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from llmc.bench import bucket_times, contenders
from llmc.bench.contenders import Ready
from llmc.bench.peers import catalogue, machine
from llmc.bench.peers.results import Comparison
from llmc.bench.peers.worker import Contender
from llmc.buckets.bench_file import Bench
from llmc.cli import bench_cpu
from llmc.compiler.targets.cpu.auto_engine import OWN
from llmc.testing.toy import write_toy
from tests.bench.loadtest.scripted import Answer, serving, stream
from tests.cli.helpers import Llmc, Ran
from tests.tiers import default_cases

FAKE = str(Path(__file__).parents[1] / "bench" / "peers" / "fake_engine")
SIGNALS = pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])


def interrupted(ran: Ran, missing: str) -> None:
    assert ran.code == 130, ran
    assert ran.err.splitlines()[-2:] == [f"llmc: not measured: {missing}", "llmc: interrupted"]


@SIGNALS
def test_buckets(llmc: Llmc, bundle: Path, here: Path, monkeypatch: pytest.MonkeyPatch, signum: int) -> None:
    times, asked = bucket_times._times, []

    def signal_at_the_third(*args: Any) -> Any:
        asked.append(args)
        if len(asked) == 3:
            signal.raise_signal(signum)
        return times(*args)

    monkeypatch.setattr(bucket_times, "_times", signal_at_the_third)
    ran = llmc("bench", bundle, "--seconds", 0, "-o", "bench.json", "-q")
    bench = Bench.load(here / "bench.json")
    assert len(bench.measurements) == 2 and len(bench.unmeasured) == 4
    interrupted(ran, "; ".join(bench.unmeasured))
    assert "interrupted: 4 buckets were not measured" in ran.out
    (here / "requests.csv").write_text("time,prompt_tokens,output_tokens\n0,20,10\n1,8,20\n")
    left = llmc("plan", "--max-model-len", 32, "--bench", "bench.json", "--traffic", "requests.csv")
    assert "no prompt measurement" in left.failed(2)


def test_buckets_before_the_first(llmc: Llmc, bundle: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(bucket_times, "_times", lambda *_: signal.raise_signal(signal.SIGTERM))
    ran = llmc("bench", bundle, "--seconds", 0, "-o", "bench.json", "-q")
    assert (ran.code, ran.out, ran.err) == (130, "", "llmc: interrupted\n")
    assert not (here / "bench.json").exists()
    assert signal.getsignal(signal.SIGTERM) == before


@default_cases(1)
@SIGNALS
def test_against(llmc: Llmc, tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch, signum: int) -> None:
    toy = write_toy(tmp_path / "toy", max_position_embeddings=128)
    interrupts = {"interrupts": {"rows": 4, "signal": int(signum)}}
    peer = catalogue.Peer("fake", FAKE, ("numpy",), {"f32": catalogue.Variant("huggingface", 32, interrupts)})
    monkeypatch.setattr(catalogue, "PEERS", {"fake": peer})
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 16)
    limits = ("--max-model-len", 128, "--max-num-seqs", 4)
    assert llmc("compile", toy, "--device", "fake", *limits, "-o", "bundle", "-q").code == 0
    asked = ("--only", "decode,memory", "--quick", "-o", "out.json", "--json", "-q")
    ran = llmc("bench", "bundle", "--against", "fake", *asked)
    found = Comparison.load(here / "out.json")
    assert json.loads(ran.out) == found.to_dict()
    assert {name: len(values) for name, values in found.series[0].rounds.items()} == {"llmc": 2, "fake f32": 2}
    assert found.unfinished[0] == "decode step, batch 4 in every round (llmc 0 of 2, fake f32 0 of 2)"
    assert found.unfinished[1:3] == ["decode step, batch 8", "decode step, batch 16"]
    interrupted(ran, "; ".join(found.unfinished))


@SIGNALS
def test_cpu(llmc: Llmc, bundle: Path, here: Path, monkeypatch: pytest.MonkeyPatch, signum: int) -> None:
    toy = write_toy(here / "toy", max_position_embeddings=128)
    options = {"interrupts": {"rows": 4, "signal": int(signum)}}

    def fakes(bundles: dict[str, Any], *_: Any, **__: Any) -> Ready:
        return Ready(
            "toy", [Contender(name, "llmc", FAKE, sys.executable, "x", options) for name in bundles], None, [], 1, 5
        )

    monkeypatch.setattr(contenders, "make_ready", fakes)
    monkeypatch.setattr(bench_cpu, "_compiled", lambda *_: bundle)
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 16)
    monkeypatch.setenv("LLMC_CACHE_DIR", str(here / "cache"))
    ran = llmc("bench", "cpu", toy, "--quick", "--json")
    found = Comparison.load(here / "cache" / "measurements" / bench_cpu.INTERRUPTED)
    assert json.loads(ran.out) == found.to_dict()
    assert set(found.series[0].rounds) == {"onnxruntime int8", "openvino int8"}
    assert not (here / "cache" / OWN).exists()
    interrupted(ran, "; ".join(found.unfinished))


@SIGNALS
def test_serve(llmc: Llmc, here: Path, signum: int) -> None:
    with serving(stream(gap=0.01, count=3, prompt=128)) as server:
        answered = server.script

        def signal_at_the_fourth(number: int, body: Any) -> Answer:
            if len(server.requests) >= 4:
                os.kill(os.getpid(), signum)
                return Answer([(30.0, b"")])
            return answered(number, body)

        server.script = signal_at_the_fourth
        sizes = ("-n", 9, "--output-len", 3, "--warmup", 0, "--concurrency", 1)
        ran = llmc("bench", "serve", server.url, *sizes, "-o", "run.json", "-q")
    document = json.loads((here / "run.json").read_text())
    assert (document["ok"], document["requests"], document["unfinished"]) == (3, 3, 6)
    assert len(document["each"]) == 3
    assert "interrupted: 6 of 9 requests were not sent or had not ended; the figures are of the others" in ran.out
    interrupted(ran, "6 of 9 requests")


def test_serve_before_the_first_answer(llmc: Llmc, here: Path) -> None:
    with serving(stream(gap=0.01, count=3, prompt=128)) as server:

        def signal_at_once(number: int, body: Any) -> Answer:
            os.kill(os.getpid(), signal.SIGTERM)
            return Answer([(30.0, b"")])

        server.script = signal_at_once
        ran = llmc("bench", "serve", server.url, "-n", 3, "--warmup", 0, "--concurrency", 1, "-o", "run.json", "-q")
    assert (ran.code, ran.out, ran.err) == (130, "", "llmc: interrupted\n")
    assert not (here / "run.json").exists()
