"""An interrupted bench keeps, shows and writes what it measured, and says what it did not: each as a whole command."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from llmc.bench import bucket_times, cpu_engines
from llmc.buckets.cost.bench import Bench
from llmc.cli.bench import INTERRUPTED
from llmc.compiler.targets.cpu import OWN, load
from llmc.runtime.bundle import Bundle
from llmc.testing.toy import write_toy
from tests.cli.helpers import Llmc, Ran

FAKE = Path(__file__).parents[1] / "bench" / "fake_engine.py"
SIGNALS = pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])


def interrupted(ran: Ran, missing: str) -> None:
    assert ran.code == 130, ran
    assert ran.err.splitlines()[-2:] == [f"llmc: not measured: {missing}", "llmc: interrupted"]


@SIGNALS
def test_buckets(llmc: Llmc, bundle: Path, here: Path, monkeypatch: pytest.MonkeyPatch, signum: int) -> None:
    times, requested = bucket_times._times, []

    def signal_at_the_third(*args: Any) -> Any:
        requested.append(args)
        if len(requested) == 3:
            signal.raise_signal(signum)
        return times(*args)

    monkeypatch.setattr(bucket_times, "_times", signal_at_the_third)
    ran = llmc("bench", bundle, "--seconds", 0, "-o", "bench.json", "-q")
    bench = Bench.load(here / "bench.json")
    assert len(bench.measurements) == 2 and len(bench.unmeasured) == 4
    interrupted(ran, "; ".join(bench.unmeasured))
    assert "interrupted: 4 buckets not measured" in ran.out
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


@SIGNALS
def test_cpu(llmc: Llmc, bundle: Path, here: Path, monkeypatch: pytest.MonkeyPatch, signum: int) -> None:
    toy = write_toy(here / "toy", max_position_embeddings=128)
    monkeypatch.setenv("FAKE_ENGINE", json.dumps({"interrupts": {"rows": 4, "signal": int(signum)}}))
    monkeypatch.setattr(cpu_engines, "ENGINE", FAKE)
    monkeypatch.setattr(cpu_engines, "compiled", lambda *_: Bundle.open(bundle))
    monkeypatch.setenv("LLMC_CACHE_DIR", str(here / "cache"))
    ran = llmc("bench", "cpu", toy, "--quick", "--json")
    found = json.loads((here / "cache" / "measurements" / INTERRUPTED).read_text())
    assert json.loads(ran.out) == found
    assert set(found["rounds"][cpu_engines.decode(1)]) == {"onnxruntime int8", "openvino int8"}
    assert not (here / "cache" / OWN).exists()
    interrupted(ran, "; ".join(found["unfinished"]))


def test_cpu_to_its_end(llmc: Llmc, bundle: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = write_toy(here / "toy", max_position_embeddings=128)
    monkeypatch.setattr(cpu_engines, "ENGINE", FAKE)
    monkeypatch.setattr(cpu_engines, "compiled", lambda *_: Bundle.open(bundle))
    monkeypatch.setenv("LLMC_CACHE_DIR", str(here / "cache"))
    ran = llmc("bench", "cpu", toy, "--quick", "-q")
    (measured,) = load(here / "cache" / OWN)
    assert measured.engines["openvino"]["int8"]["decode_ms"] == {1: 2.0, 4: 8.0, 8: 16.0, 16: 32.0}
    assert ran.code == 0 and "decode 1" in ran.out and "--max-num-seqs 16: " in ran.out
